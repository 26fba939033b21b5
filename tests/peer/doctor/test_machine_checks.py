"""What is installed, what computes, what is limited."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.peer.doctor.finding import Level
from gossamer.peer.doctor.machine_checks import UP, device, open_files, versions
from tests.peer.doctor.cases import case, examined

PYTHON = ">=3.11"


def test_this_installation_meets_the_requirements(tmp_path: Path) -> None:
    assert examined("versions", case(tmp_path)).level is Level.OK


@pytest.mark.parametrize(
    ("python", "requirement", "there", "words"),
    [
        (PYTHON, "torch>=99", "2.9", "torch is 2.9, wanted is >=99"),
        (PYTHON, "hivemind>=1.1.12,<1.2", "1.2.0", "hivemind is 1.2.0"),
        (PYTHON, "uvloop>=0.21", None, "uvloop is missing"),
        (">=4", "torch>=2", "2.9", "wanted is >=4"),
    ],
    ids=["too old", "too new", "missing", "python"],
)
def test_a_wrong_version_fails(python: str, requirement: str, there: str | None, words: str) -> None:
    finding = versions(python, [requirement], lambda name: there)
    assert finding.level is Level.FAIL and words in finding.found and finding.way_out


def test_requirements_of_extras_are_ignored() -> None:
    assert versions(PYTHON, ['pytest>=9; extra == "test"'], lambda name: None).level is Level.OK


def test_torch_computes_on_the_processor_whatever_lies_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gossamer").mkdir()
    (tmp_path / "gossamer" / "__init__.py").write_text("raise ImportError('another package of this name')\n")
    monkeypatch.chdir(tmp_path)
    finding = examined("device", case(tmp_path))
    assert finding.level is Level.OK and "computes right" in finding.found


def test_a_device_that_is_absent(tmp_path: Path) -> None:
    finding = examined("device", case(tmp_path, devices="cuda:7"))
    assert finding.level is Level.FAIL and ("no device cuda:7" in finding.found or "'cuda:7' needs a GPU" in finding.found)


@pytest.mark.parametrize(
    ("code", "output", "level", "words"),
    [
        (None, "", Level.WARN, "did not even load"),
        (None, f"{UP}\n", Level.FAIL, "did not compute anything on cuda"),
        (1, f"{UP}\ntorch computes wrong results on cuda: the machine or its driver is broken", Level.FAIL, "wrong results"),
        (-11, UP, Level.FAIL, "signal 11"),
    ],
    ids=["busy", "hangs", "wrong", "crashed"],
)
def test_a_device_that_does_not_compute(code: int | None, output: str, level: Level, words: str) -> None:
    finding = device("cuda", code, output)
    assert finding.level is level and words in finding.found and finding.way_out


@pytest.mark.parametrize(("most", "level"), [(64, Level.FAIL), (512, Level.WARN), (4096, Level.OK), (resource.RLIM_INFINITY, Level.OK)])
def test_the_limit_of_open_files(most: int, level: Level) -> None:
    assert open_files(most).level is level


def test_a_low_limit_of_this_process_is_seen(tmp_path: Path) -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from gossamer.peer.doctor.examination import CHECKS\n"
        "print(CHECKS['open files'](None).level.value)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "fail"
