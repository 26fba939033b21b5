"""Who may import whom: cli -> peer -> {optim, protocol}, and which heavy packages each layer may know."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cli", "optim", "peer", "protocol")
MAY_IMPORT = {
    "cli": {"cli", "peer", "optim", "protocol"},
    "peer": {"peer", "optim", "protocol"},
    "optim": {"optim"},
    "protocol": {"protocol"},
}
FORBIDDEN = {
    "optim": {"asyncio", "grpc", "hivemind"},
    "protocol": {"torch", "transformers", "datasets", "safetensors"},
    "peer": {"hivemind"},
    "cli": {"hivemind", "grpc"},
}
HIVEMIND_FILES = {"protocol/engine.py"}
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full dotted names of every module that `path` imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the package border"
            names.update([node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


def imported_at_start(path: Path) -> set[str]:
    """As `imported`, but only what importing the file runs: module level, not inside functions or `if TYPE_CHECKING`."""
    body = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        else:
            names.update([node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_layers_import_only_downwards(path: Path) -> None:
    package = label(path).split("/")[0]
    ours = {name.split(".")[0] for name in imported(path)} & set(PACKAGES)
    assert ours <= MAY_IMPORT[package]


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_heavy_packages_stay_in_their_layer(path: Path) -> None:
    package = label(path).split("/")[0]
    tops = {name.split(".")[0] for name in imported(path)}
    assert not tops & FORBIDDEN[package] - ({"hivemind"} if label(path) in HIVEMIND_FILES else set())
    if package == "protocol" and label(path) not in HIVEMIND_FILES:
        assert "hivemind" not in tops


def test_cli_starts_without_what_is_slow_to_import() -> None:
    """`peer --help` and `peer id` must answer at once, so no file that they load may pull in torch or hivemind."""
    seen: set[Path] = set()
    waiting = [path for path in SOURCES if label(path).startswith("cli/")]
    while waiting:
        path = waiting.pop()
        seen.add(path)
        names = imported_at_start(path)
        slow = {name.split(".")[0] for name in names} & {"torch", "hivemind", "transformers", "datasets", "grpc"}
        assert not slow, f"{label(path)} imports {', '.join(sorted(slow))} and is loaded by every `peer` command"
        files = {file for name in names for file in _files_of(name)}
        waiting += files - seen
    assert seen


def _files_of(name: str) -> set[Path]:
    """The files of ours that importing the dotted `name` runs, its packages' __init__.py included."""
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        return set()
    places = [ROOT.joinpath(*parts[: i + 1]) for i in range(len(parts))]
    candidates = [place / "__init__.py" for place in places] + [place.with_suffix(".py") for place in places]
    return {path for path in candidates if path.is_file()}
