"""An installation without the extras: processes in which none of their packages can be imported, for every verb."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gossamer.cli.main import VERBS
from gossamer.peer.machine.extras import EXTRAS
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import ExitCode
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest
from tests.cli.shell import ROOT, Start
from tests.cli.test_compare import ran
from tests.peer.fine_tuned import base_model
from tests.peer.trained_homes import tiny_manifest, trained_home

START_S = 60.0  # of a node, on a busy machine
ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
RUN_ALL = """
import contextlib, io, json, sys
from gossamer.cli.main import run

for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run(arguments)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
Ended = tuple[int, str, str]
"""Exit code, output and errors of a command."""
RunAll = Callable[..., list[Ended]]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """The home of a host that has trained."""
    home = Home(tmp_path / "homes/one")
    home.create()
    host = Identity.load_or_create(home.identity).peer_id
    trained_home(home.path, Manifest.checked(tiny_manifest().model_dump() | {"run": {"access": "invite"}}).with_host(host), 1)
    ran(home, 1000.0, 9)
    return home


@pytest.fixture
def without(tmp_path: Path) -> Callable[[Iterable[str]], dict[str, str]]:
    """Return the environment of a process without the packages of these extras; its children lack them too."""

    def environment(extras: Iterable[str]) -> dict[str, str]:
        names = {module for extra in extras for module in EXTRAS[extra][1]}
        (tmp_path / "sitecustomize.py").write_text(ABSENT.format(names=names))
        return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    return environment


@pytest.fixture
def run_all(tmp_path: Path, without: Callable[[Iterable[str]], dict[str, str]]) -> RunAll:
    """Run command lines one after the other in a process without the packages of these extras."""

    def ran_without(*commands: Iterable[str], extras: Iterable[str] = EXTRAS) -> list[Ended]:
        program = [sys.executable, "-P", "-c", RUN_ALL, json.dumps(commands)]
        environment = os.environ | without(extras)
        done = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]

    return ran_without


LOCAL = ("--listen", "127.0.0.1", "--devices", "cpu")
NEEDS: dict[str, list[tuple[tuple[str, ...], str]]] = {  # by verb: arguments, and the extra that is missing
    "demo": [((), "text"), (("--plot", "x.png"), "plot")],
    "init": [(("new.toml", "--from", "."), "text"), (("new.toml", "--from", "BASE", "--lora", "4"), "lora")],
    "host": [(LOCAL, "text"), ((*LOCAL, "--metrics", "9464"), "metrics")],
    "join": [(LOCAL, "text"), ((*LOCAL, "--metrics", "9464"), "metrics")],
    "bootstrap": [(("--metrics", "9464"), "metrics")],
    "backup": [(("file",), "backup")],
    "restore": [((__file__,), "backup")],
    "watch": [((), "watch")],
    "dashboard": [((), "dashboard")],
    "generate": [((), "text")],
    "export": [(("model",), "text")],
    "eval": [((), "text")],
    "compare": [((), "text")],
    "simulate": [((), "text"), (("--network",), "text"), (("--plot", "x.png"), "plot")],
}
WITHOUT = (  # extras; the order is that of a shell
    ("init", "new.toml"), ("id",), ("config",), ("logs",), ("logs", "--report"), ("status",), ("peers",),
    ("service", "status"), ("simulate", "--swarm", "--peers", "2", "--cut", "0"),
)  # fmt: skip
WITH_A_PEER = (
    ("status",),
    ("run",),
    ("peers",),
    ("credit",),
    ("invite",),
    ("pause",),
    ("resume",),
    ("revoke", str(Identity(b"x" * 32).peer_id)),
    ("leave",),
)
EVERY = {*NEEDS, *(words[0] for words in (*WITHOUT, *WITH_A_PEER)), "doctor", "man"}


def test_every_verb_is_tried() -> None:
    assert set(VERBS) == EVERY


def command_line(verb: str, arguments: Iterable[str], home: Home, folder: Path) -> tuple[str, ...]:
    """Return a command that works on a copy of the home in this folder, so that no other command changes what it finds."""
    shutil.copytree(home.path, folder / "one")
    if verb == "compare":
        trained_home(folder / "alone", tiny_manifest(), 2)
    base = (str(base_model(folder / "base")) if word == "BASE" else word for word in arguments)
    return (verb, *base, *({"demo": (), "compare": ("--home", str(folder))}.get(verb, ("--home", str(folder / "one")))))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(extra: str, home: Home, run_all: RunAll, tmp_path: Path) -> None:
    rows = [(verb, arguments) for verb in NEEDS for arguments, needed in NEEDS[verb] if needed == extra]
    assert rows
    commands = [command_line(*row, home, tmp_path / str(number)) for number, row in enumerate(rows)]
    packages = ", ".join(name.replace("_", "-") for name in EXTRAS[extra][1])
    for command, (code, out, err) in zip(commands, run_all(*commands, extras=(extra,)), strict=True):
        assert "Traceback" not in err and (code, out) == (ExitCode.BAD_INPUT, ""), (command, err)
        error, hint = err.splitlines()[-2:]
        assert error == f"error: {EXTRAS[extra][0]} needs packages that are not installed ({packages})", (command, err)
        assert hint == f"hint: pip install 'gossamer-peer[{extra}]'", (command, err)


def test_the_doctor_names_a_missing_extra(tmp_path: Path, run_all: RunAll) -> None:
    [(code, out, err)] = run_all(("doctor", "--home", str(tmp_path / "home"), "--listen", "127.0.0.1"))
    assert code == ExitCode.BAD_INPUT and "-> pip install 'gossamer-peer[text]'" in out and not err, out + err


def test_the_other_verbs_need_no_extra(home: Home, run_all: RunAll) -> None:
    complaints = {"status": "no peer is running", "peers": "no peer is running", "service": "no service"}
    for words, (code, _, err) in zip(WITHOUT, run_all(*((*words, "--home", str(home.path)) for words in WITHOUT)), strict=True):
        complaint = complaints.get(words[0], "")
        assert code == (ExitCode.BAD_INPUT if complaint else ExitCode.DONE) and complaint in err, (words, err)


def test_init_without_the_packages_says_what_it_did_not_try_and_the_manual_page_needs_none(home: Home, run_all: RunAll) -> None:
    folder = ("--home", str(home.path))
    second, third, manual = run_all(("init", "second.toml", *folder), ("init", "third.toml", "--codec", "zip", *folder), ("man",))
    assert second[0] == ExitCode.DONE and "model and tokenizer were not tried" in second[2] and "gossamer-peer[text]" in second[2]
    assert third[0] == ExitCode.BAD_INPUT and 'codec.name = "zip"' in third[2]
    assert (manual[0], manual[2]) == (ExitCode.DONE, "") and manual[1].startswith(".TH PEER 1")


@pytest.mark.timeout(120)
def test_a_bootstrap_node_and_the_verbs_that_talk_to_it_need_no_extra(
    home: Home, start: Start, without: Callable[[Iterable[str]], dict[str, str]], run_all: RunAll
) -> None:
    folder = ("--home", str(home.path))
    node = start("bootstrap", "--listen", "127.0.0.1", *folder, **without(EXTRAS))
    assert node.stdout is not None and "/p2p/" in node.stdout.readline()
    for words, (code, _, err) in zip(WITH_A_PEER, run_all(*((*words, *folder) for words in WITH_A_PEER)), strict=True):
        is_refused = words[0] == "pause"  # it does not train
        assert code == (ExitCode.BAD_INPUT if is_refused else ExitCode.DONE) and ("does not train" in err) is is_refused, (words, err)
    node.communicate(timeout=START_S)
    assert node.returncode == ExitCode.DONE


@pytest.mark.timeout(120)
def test_an_import_of_the_package_needs_no_extra(without: Callable[[Iterable[str]], dict[str, str]]) -> None:
    program = "import gossamer, sys; gossamer.host; assert any(type(finder).__name__ == 'Absent' for finder in sys.meta_path)"
    subprocess.run([sys.executable, "-P", "-c", program], env=os.environ | without(EXTRAS), check=True)


def test_the_table_of_extras_is_that_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: {Requirement(text).name for text in packages} for name, packages in project["optional-dependencies"].items()}
    assert {name: {module.replace("_", "-") for module in modules} for name, (_, modules) in EXTRAS.items()} == {
        name: packages for name, packages in extras.items() if name not in ("all", "docs", "test")
    }
    assert Requirement(project["optional-dependencies"]["all"][0]).extras == set(EXTRAS)
    core = {Requirement(text).name for text in project["dependencies"]}
    assert not core & {package for name in EXTRAS for package in extras[name]}
    assert "gossamer-peer[all]" in project["optional-dependencies"]["test"]
