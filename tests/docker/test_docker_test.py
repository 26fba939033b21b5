"""`docker/test` on a busy machine and over leftovers; a script stands in for Docker, which notes what it is told."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

DOCKER = Path(__file__).parents[2] / "docker"


@pytest.fixture
def told(tmp_path: Path) -> Path:
    notes, program = tmp_path / "told", tmp_path / "docker"
    program.write_text(
        f"""#!/bin/sh
echo "$*" >> {notes}
case "$*" in
    "container ls"*) echo left1 left2 ;;
    "volume ls"*) echo kept ;;
    "version --format"*) echo 28.2.2 ;;
    "buildx version") exit 1 ;;
esac
"""
    )
    program.chmod(0o755)
    return notes


@pytest.fixture
def tests(told: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    loader = importlib.machinery.SourceFileLoader("docker_test", str(DOCKER / "test"))
    made = importlib.util.module_from_spec(importlib.util.spec_from_loader("docker_test", loader))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader.exec_module(made)
    monkeypatch.setattr(made, "DOCKER", str(told.parent / "docker"))
    return made


def test_what_an_ended_run_left_behind_is_removed(tests: ModuleType, told: Path) -> None:
    tests.clear()
    lines = told.read_text().splitlines()
    assert any("down --volumes --remove-orphans" in line for line in lines)
    assert "rm --force --volumes left1 left2" in lines and "volume rm --force kept" in lines


def test_a_meeting_of_an_earlier_run_does_not_count(tests: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    met = [{"outcome": "completed", "ts": ts} for ts in (100.0, 3500.0)]
    monkeypatch.setattr(tests, "events", lambda name, kind: met)
    assert [event["ts"] for event in tests.meetings("host", 3441.0)] == [3500.0]
    assert tests.meetings("host", 3600.0) == []


def test_containers_that_got_little_of_the_processors_are_waited_for(tests: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(tests.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(tests.time, "sleep", lambda seconds: now_s.__setitem__(0, now_s[0] + seconds))
    late = 3 * tests.PATIENCE_S
    assert tests.wait_until(lambda: now_s[0] > late, "meeting", spent_s=lambda: now_s[0] / 10)
    now_s[0] = 0.0
    with pytest.raises(tests.Broken, match="no meeting in 180 s"):
        tests.wait_until(lambda: now_s[0] > late, "meeting", spent_s=lambda: 2 * now_s[0])
    now_s[0] = 0.0
    with pytest.raises(tests.Broken, match="no meeting in 1800 s"):
        tests.wait_until(lambda: False, "meeting", spent_s=lambda: 0.0)


def test_a_docker_without_buildx_is_told_what_to_install(told: Path) -> None:
    done = subprocess.run(
        [DOCKER / "build"], env={"DOCKER": str(told.parent / "docker"), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("error: this Docker builds with buildx") and "docker-buildx" in done.stderr
    assert not any(line.startswith("build ") for line in told.read_text().splitlines())
