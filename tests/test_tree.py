"""The shape of the tree: every module has its test, every file can be read in one sitting."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cli", "optim", "peer", "protocol")
MAX_LINES = 300


def is_generated(path: Path) -> bool:
    return path.stem.endswith(("_pb2", "_pb2_grpc"))


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if not is_generated(path))
WRITTEN = MODULES + sorted(path for folder in ("benchmarks", "tests") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__init__.py"], ids=label)
def test_each_module_has_its_test(path: Path) -> None:
    """`optim/noloco.py` has `tests/optim/test_noloco.py`, or several: `test_noloco_swarm.py`."""
    inside = path.relative_to(ROOT)
    folders = {ROOT / "tests" / inside.parent, ROOT / "tests" / inside.parts[0]}
    names = (f"test_{inside.stem}.py", f"test_{inside.stem}_*.py")
    found = [test for folder in folders for name in names for test in folder.glob(name)]
    assert found, f"write tests/{(inside.parent / names[0]).as_posix()}"


@pytest.mark.parametrize("path", WRITTEN, ids=label)
def test_each_file_is_short(path: Path) -> None:
    num_lines = len(path.read_text().splitlines())
    assert num_lines < MAX_LINES, f"{num_lines} lines; cut it along a noun"


@pytest.mark.parametrize("path", WRITTEN, ids=label)
def test_each_file_is_ascii(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    strange = [number for number, line in enumerate(text.splitlines(), 1) if not line.isascii()]
    assert not strange, f"other than ASCII on lines {strange}"
