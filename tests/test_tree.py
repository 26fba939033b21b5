"""The shape of the tree: file lengths, folder docstrings, unique class names, mirrored tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cli", "optim", "peer", "protocol")
MAX_LINES = 500


def is_generated(path: Path) -> bool:
    return path.stem.endswith("_pb2")


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if not is_generated(path))
WRITTEN = MODULES + sorted(path for folder in ("benchmarks", "tests") for path in (ROOT / folder).rglob("*.py"))
FOLDERS = sorted({path.parent for path in MODULES})


def test_each_file_is_short() -> None:
    too_long = {label(path): num_lines for path in WRITTEN if (num_lines := len(path.read_text().splitlines())) > MAX_LINES}
    assert not too_long, "cut it along an idea"


@pytest.mark.parametrize("folder", FOLDERS, ids=label)
def test_each_folder_has_a_docstring(folder: Path) -> None:
    assert (folder / "__init__.py").read_text().startswith('"""')


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(label(path))
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert not shared, "a reader of one meets the other"


def test_each_file_is_ascii() -> None:
    strange = [
        f"{label(path)}:{number}"
        for path in WRITTEN
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.isascii()
    ]
    assert not strange


def test_peer_has_few_folders() -> None:
    inside = [path for path in (ROOT / "peer").iterdir() if path.name != "__pycache__"]
    assert len([path for path in inside if path.is_dir()]) <= 13
    assert len([path for path in inside if path.is_file()]) <= 2


def test_tests_mirror_the_packages() -> None:
    """Each folder of tests has the name of the folder that it tests, so that a reader finds one from the other."""
    tested = [folder for package in PACKAGES for folder in (ROOT / "tests" / package).rglob("*") if folder.is_dir()]
    strays = [
        label(folder) for folder in tested if folder.name != "__pycache__" and not (ROOT / folder.relative_to(ROOT / "tests")).is_dir()
    ]
    assert not strays
