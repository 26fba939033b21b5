"""The wheel installs one top-level package, and no other distribution or file of a user's collides with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.release import lowest

ROOT = Path(__file__).parents[1]
FOLDERS = ("cli", "optim", "peer", "protocol")
NAMESAKES = ("optim", "peer", "protocol")  # each is the name of another distribution on PyPI and of its top-level package
LOAD = "import gossamer.cli.main, gossamer.optim.fragments, gossamer.peer.machine.status, gossamer.protocol.identity"


def run_python(python: Path, *arguments: str, folder: Path) -> str:
    """Run an interpreter that finds the libraries of this environment, but not its editable install of Gossamer."""
    libraries = next(path for path in sys.path if path.endswith("site-packages"))
    environment = {"PATH": "", "HOME": str(folder), "PYTHONPATH": libraries}
    done = subprocess.run([python, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout


def copied(folder: Path) -> Path:
    """Copy what our wheel is built from."""
    folder.mkdir()
    for name in (*FOLDERS, "gossamer"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build_wheel(source: Path, target: Path, **environment: str) -> Path:
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    )
    subprocess.run([*pip, "--wheel-dir", target, source], check=True, capture_output=True, timeout=50, env=os.environ | environment)
    return next(target.glob(f"{source.name}*.whl"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return our wheel and, by name, a wheel for each namesake."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = {"gossamer": copied(folder / "gossamer_peer")}
    for name in NAMESAKES:
        sources[name] = folder / name
        (folder / name / name).mkdir(parents=True)
        (folder / name / name / "__init__.py").write_text(f"OWNER = 'the distribution {name}'\n")
        project = f'[project]\nname = "{name}"\nversion = "1"\n'
        (folder / name / "pyproject.toml").write_text(f'[build-system]\nrequires = ["setuptools"]\n{project}')
    return {name: build_wheel(source, folder / "built") for name, source in sources.items()}


def new_environment(folder: Path, wheels: Iterable[Path]) -> Path:
    """Make a virtual environment, install the wheels one after the other, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=50)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python))
    for wheel in wheels:
        subprocess.run([*pip, "install", "--no-index", "--no-deps", wheel], check=True, capture_output=True, timeout=50)
    return python


def test_the_wheel_installs_one_top_level_package(wheels: dict[str, Path]) -> None:
    names = zipfile.ZipFile(wheels["gossamer"]).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"gossamer"}
    files = {name.removeprefix("gossamer/") for name in names}
    made = {"__pycache__", "_compiled.abi3.so"}
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file() and not made & set(path.parts)]
    assert not [path for path in sources if path.relative_to(ROOT).as_posix() not in files]
    assert "py.typed" in files


def has_compiler() -> bool:
    return shutil.which((os.environ.get("CC") or sysconfig.get_config_var("CC")).split()[0]) is not None


@pytest.mark.parametrize("compiler", ["there", "missing"])
def test_a_machine_without_a_c_compiler_gets_a_peer_that_codes_with_torch(wheels: dict[str, Path], tmp_path: Path, compiler: str) -> None:
    there = compiler == "there" and has_compiler()
    wheel = wheels["gossamer"] if there else build_wheel(copied(tmp_path / "gossamer_peer"), tmp_path / "built", CC="/no/compiler")
    assert wheel.name.split("-")[2:4] == ["cp311", "abi3"], "one wheel for every Python"
    python = new_environment(tmp_path / "environment", [wheel])
    ask = "import torch; from gossamer.optim.compiled import coding_words; print(coding_words(torch.device('cpu')))"
    words = run_python(python, "-c", ask, folder=tmp_path).strip()
    assert words == ("compiled" if there else "torch (no compiled part here; `pip install` with a C compiler builds it)")


@pytest.mark.parametrize("order", [(*NAMESAKES, "gossamer"), ("gossamer", *NAMESAKES)], ids=["namesakes first", "gossamer first"])
def test_distributions_of_the_same_names_do_no_harm(wheels: dict[str, Path], tmp_path: Path, order: tuple[str, ...]) -> None:
    python = new_environment(tmp_path / "environment", [wheels[name] for name in order])
    namesakes = "import optim, peer, protocol; print(optim.OWNER, peer.OWNER, protocol.OWNER, sep='; ')"
    owners = run_python(python, "-c", f"{LOAD}; {namesakes}", folder=tmp_path)
    assert owners.strip() == "; ".join(f"the distribution {name}" for name in NAMESAKES)


def test_files_of_the_same_names_beside_a_script_do_no_harm(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = new_environment(tmp_path / "environment", [wheels["gossamer"]])
    for name in ("cli", "optim"):
        (tmp_path / f"{name}.py").write_text("OWNER = 'the user'\n")
    for name in ("peer", "protocol"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'the user'\n")
    script = tmp_path / "train.py"
    script.write_text(f"import cli, optim, peer, protocol\n{LOAD}\nprint(cli.OWNER, optim.OWNER, peer.OWNER, protocol.OWNER, sep='; ')\n")
    assert run_python(python, str(script), folder=tmp_path).strip() == "; ".join(["the user"] * 4)


def test_the_command_runs_from_a_folder_with_such_files(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = new_environment(tmp_path / "environment", [wheels["gossamer"]])
    for name in FOLDERS:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported in place of ours')\n")
    assert run_python(python, str(python.with_name("peer")), "id", "--home", str(tmp_path / "home"), folder=tmp_path).startswith("12D3Koo")


def test_every_package_that_is_needed_has_a_lower_bound_that_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [
        Requirement(text) for text in (*project["dependencies"], *(text for name in extras if name != "test" for text in extras[name]))
    ]
    bounds = dict(line.split("==") for line in lowest(needed))
    assert {one.name for one in needed} == {*bounds, "gossamer-peer"}
    generated = (ROOT / "protocol/wire/peer_pb2.py").read_text().partition("Protobuf Python Version: ")[2].split()[0]
    assert bounds["protobuf"] == generated, "an older protobuf refuses the generated code"
