"""The allowed imports between folders, and the modules that each process loads."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cli", "optim", "peer", "protocol")  # each is also gossamer.NAME, by a link in gossamer/
PROTOCOL_ROOT = {"protocol", "protocol.wire"}  # errors, identity, addresses, limits: every folder may import them
PROTOCOL = {*PROTOCOL_ROOT, "protocol.run", "protocol.messages", "protocol.streams", "protocol.libp2p"}
EVERYTHING = {
    *PROTOCOL, "protocol.memory",
    "optim", "optim.codecs", "peer", "peer.machine", "peer.link", "peer.text", "peer.model", "peer.swarm", "peer.meeting", "peer.pipeline",
    "peer.trainer", "peer.sync", "peer.node", "peer.supervisor", "peer.simulator", "peer.doctor",
}  # fmt: skip
BELOW = {
    # folder: the folders that it may import from, beside itself
    "optim": {"optim.codecs"},
    "optim.codecs": {"optim"},
    "protocol": set[str](),
    "protocol.wire": set[str](),
    "protocol.run": PROTOCOL_ROOT,
    "protocol.messages": {*PROTOCOL_ROOT, "protocol.run"},
    "protocol.streams": {*PROTOCOL_ROOT, "protocol.messages"},
    "protocol.libp2p": {*PROTOCOL_ROOT, "protocol.run", "protocol.messages", "protocol.streams"},
    "protocol.memory": {*PROTOCOL_ROOT, "protocol.streams", "protocol.libp2p"},  # libp2p: for the directory's calls
    "peer.machine": PROTOCOL,
    "peer.link": PROTOCOL,
    "peer.text": {*PROTOCOL, "peer.machine"},
    "peer.model": {*PROTOCOL, "optim", "optim.codecs", "peer.text", "peer.machine"},
    "peer.swarm": {*PROTOCOL, "peer.machine"},
    "peer.meeting": {*PROTOCOL, "peer.link", "peer.swarm", "peer.machine"},
    "peer.pipeline": {*PROTOCOL, "peer.link", "peer.swarm", "peer.machine"},
    "peer.supervisor": {*PROTOCOL, "peer.machine"},
    "peer.trainer": {*PROTOCOL, "optim", "optim.codecs", "peer.link", "peer.model", "peer.text", "peer.machine"},
    # neither peer.sync nor peer.node imports peer.model: no tensor, no transformers
    "peer.sync": {*PROTOCOL, "peer.meeting", "peer.link", "peer.swarm", "peer.machine"},
    "peer.node": {*PROTOCOL, "peer.sync", "peer.meeting", "peer.pipeline", "peer.link", "peer.swarm", "peer.machine"},
    "peer.simulator": {
        *PROTOCOL,
        "optim",
        "optim.codecs",
        "peer.trainer",
        "peer.model",
        "peer.text",
        "peer.machine",
        "protocol.memory",
        "peer.sync",
        "peer.node",
        "peer.meeting",
        "peer.pipeline",
        "peer.link",
        "peer.swarm",
    },  # fmt: skip
    "peer.doctor": {*PROTOCOL, "peer.sync", "peer.node", "peer.trainer", "peer.meeting", "peer.swarm", "peer.model", "peer.machine"},
    "cli": {*EVERYTHING, "cli.page"},
    "cli.page": {"cli", "peer.machine", "protocol"},
}
FORBIDDEN = {
    "optim": {"asyncio", "grpc", "hivemind"},
    "protocol": {"torch", "transformers", "datasets", "safetensors", "hivemind"},  # but for HIVEMIND_FILES
    "peer": {"hivemind", "grpc"},
    "cli": {"hivemind", "grpc"},
}
HIVEMIND_FILES = {"protocol/libp2p/hivemind_imports.py"}
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def folder_of(path: Path) -> str:
    return label(path.parent).replace("/", ".")


in_each_folder = pytest.mark.parametrize("folder", sorted(set(map(folder_of, SOURCES))))


def sources_of(folder: str) -> list[Path]:
    return [path for path in SOURCES if folder_of(path) == folder]


@functools.cache
def imported(path: Path) -> set[str]:
    """Return the full dotted names of all modules that `path` imports, at any place in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the package border"
            names.update([node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)])
    assert not {name.split(".")[0] for name in names} & set(PACKAGES), f"{path}: our packages are imported as gossamer.NAME"
    return names


@functools.cache
def modules_of_ours(path: Path) -> set[Path]:
    """Return the files of this repository that `path` imports."""
    ours = [name.removeprefix("gossamer.").split(".") for name in imported(path) if name.startswith("gossamer.")]
    return {file for parts in ours if (file := ROOT.joinpath(*parts).with_suffix(".py")).is_file()}


@in_each_folder
def test_folders_import_only_downwards(folder: str) -> None:
    for path in [] if folder == "peer" else sources_of(folder):
        others = {folder_of(file) for file in modules_of_ours(path)} - {folder}
        assert others <= BELOW[folder], f"{label(path)} of {folder} imports from {', '.join(sorted(others - BELOW[folder]))}"


def test_only_the_verb_simulate_imports_the_simulator() -> None:
    for path in SOURCES:
        folders = {folder_of(file) for file in modules_of_ours(path)}
        allowed = folder_of(path) == "peer.simulator" or label(path) in ("cli/simulate.py", "cli/simulation_report.py")
        assert allowed or "peer.simulator" not in folders, f"{label(path)} runs in a real peer's process"


def test_there_is_no_import_cycle() -> None:
    edges = {path: modules_of_ours(path) - {path} for path in SOURCES}
    done: set[Path] = set()

    def visit(path: Path, way: tuple[Path, ...]) -> None:
        assert path not in way, " -> ".join(label(file) for file in (*way, path))
        if path not in done:
            for other in edges[path]:
                visit(other, (*way, path))
            done.add(path)

    for path in SOURCES:
        visit(path, ())


@in_each_folder
def test_heavy_packages_stay_in_their_layer(folder: str) -> None:
    for path in sources_of(folder):
        tops = {name.split(".")[0] for name in imported(path)}
        found = tops & FORBIDDEN[folder.split(".")[0]] - ({"hivemind"} if label(path) in HIVEMIND_FILES else set())
        assert not found, f"{label(path)} imports {', '.join(sorted(found))}"


LOADED = {
    # module of a process, or with the same imports -> modules that it must not load
    "gossamer": ("transformers", "tokenizers", "datasets", "pyarrow", "hivemind", "grpc", "asyncio"),
    "gossamer.swarm": ("transformers", "tokenizers", "datasets", "pyarrow", "hivemind", "grpc"),
    "gossamer.peer.node.__main__, gossamer.peer.node.process": (
        "gossamer.peer.pipeline",  # of staged runs
        "gossamer.peer.node.staging",
        "gossamer.peer.trainer",
        "gossamer.peer.supervisor",
        "gossamer.peer.simulator",
        "gossamer.peer.text",
        "gossamer.peer.model",
        "gossamer.optim",
        "torch",
        "scipy",
        "transformers",
        "datasets",
    ),
    "gossamer.peer.trainer.__main__, gossamer.peer.trainer.process": (
        "gossamer.peer.trainer.stage_loop",  # a run without stages loads nothing of them
        "gossamer.peer.trainer.hop_queue",
        "gossamer.peer.model.stages",
        "gossamer.optim.codecs.activations",
        "gossamer.peer.sync",
        "gossamer.peer.node",
        "gossamer.peer.supervisor",
        "gossamer.peer.meeting",
        "gossamer.peer.swarm",
        "gossamer.peer.simulator",
        "gossamer.protocol.libp2p",
        "hivemind",
        "grpc",
    ),
    "gossamer.peer.supervisor.supervisor": (
        "gossamer.peer.simulator",
        "gossamer.peer.sync",
        "gossamer.peer.node",
        "gossamer.peer.trainer",
        "gossamer.peer.meeting",
        "gossamer.peer.link",
        "torch",
        "numpy",
        "transformers",
        "hivemind",
        "grpc",
    ),
    "gossamer.cli.status": ("asyncio", "pydantic", "rich", "gossamer.peer.supervisor", "gossamer.peer.swarm", "numpy"),
    "gossamer.cli.main, gossamer.cli.doctor, gossamer.peer.doctor.examination": ("gossamer.peer.simulator",),
    ", ".join(f"gossamer.cli.{verb}" for verb in ("host", "join", "bootstrap", "demo", "doctor", "export", "simulate")): (
        "gossamer.peer.sync",
        "gossamer.peer.node",
        "gossamer.peer.trainer",
        "torch",
        "numpy",
        "transformers",
        "datasets",
        "hivemind",
        "grpc",
    ),
}


@pytest.mark.parametrize("module", LOADED)
def test_a_fresh_process_loads_only_allowed_modules(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = set(done.stdout.split())
    assert not [name for name in LOADED[module] if name in loaded]
