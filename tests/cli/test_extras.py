"""An installation without the extras: real processes in which none of their packages can be imported, for every verb."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
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
from tests.peer.waiting import wait_until

START_S = 60.0  # of a node, on a busy machine
ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


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
def start(start: Start, tmp_path: Path) -> Start:
    """Start `peer ARGUMENTS` as a process without the packages of these extras; its children lack them too."""

    def started_without(*arguments: str, extras: tuple[str, ...] = tuple(EXTRAS)) -> subprocess.Popen[str]:
        names = {module for extra in extras for module in EXTRAS[extra][1]}
        (tmp_path / "sitecustomize.py").write_text(ABSENT.format(names=names))
        return start(*arguments, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")

    return started_without


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=START_S)
    return process.returncode, out, err


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
ROWS = [(verb, *row) for verb in NEEDS for row in NEEDS[verb]]


def test_every_verb_is_tried() -> None:
    assert set(VERBS) == EVERY


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("verb", "arguments", "extra"), ROWS, ids=[" ".join((verb, *arguments)) for verb, arguments, _ in ROWS])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    verb: str, arguments: tuple[str, ...], extra: str, home: Home, start: Start
) -> None:
    if verb == "compare":
        trained_home(home.path.parent / "alone", tiny_manifest(), 2)
    folder = ("--home", str(home.path.parent if verb == "compare" else home.path)) if verb != "demo" else ()
    if "BASE" in arguments:
        arguments = tuple(str(base_model(home.path / "base")) if word == "BASE" else word for word in arguments)
    code, out, err = ended(start(verb, *arguments, *folder, extras=(extra,)))
    error, hint = err.splitlines()[-2:]
    packages = ", ".join(name.replace("_", "-") for name in EXTRAS[extra][1])
    assert error == f"error: {EXTRAS[extra][0]} needs packages that are not installed ({packages})", err
    assert hint == f"hint: pip install 'gossamer-peer[{extra}]'"
    assert (code, out, "Traceback" in err) == (ExitCode.BAD_INPUT, "", False)


def test_the_doctor_names_a_missing_extra(tmp_path: Path, start: Start) -> None:
    code, out, err = ended(start("doctor", "--home", str(tmp_path / "home"), "--listen", "127.0.0.1"))
    assert code == ExitCode.BAD_INPUT and "-> pip install 'gossamer-peer[text]'" in out and not err, out + err


@pytest.mark.parametrize("words", WITHOUT, ids=" ".join)
def test_a_verb_that_needs_no_extra(words: tuple[str, ...], home: Home, start: Start) -> None:
    code, _, err = ended(start(*words, "--home", str(home.path)))
    complaint = {"status": "no peer is running", "peers": "no peer is running", "service": "no service"}.get(words[0], "")
    assert code == (ExitCode.BAD_INPUT if complaint else ExitCode.DONE) and complaint in err, err


def test_init_without_the_packages_says_what_it_did_not_try(home: Home, start: Start) -> None:
    code, _, err = ended(start("init", "second.toml", "--home", str(home.path)))
    assert code == ExitCode.DONE and "model and tokenizer were not tried" in err and "gossamer-peer[text]" in err
    code, _, err = ended(start("init", "third.toml", "--codec", "zip", "--home", str(home.path)))
    assert code == ExitCode.BAD_INPUT and 'codec.name = "zip"' in err


def test_the_manual_page_needs_no_extra(start: Start) -> None:
    code, out, err = ended(start("man"))
    assert (code, err) == (ExitCode.DONE, "") and out.startswith(".TH PEER 1")


@pytest.mark.timeout(120)
def test_a_bootstrap_node_and_the_verbs_that_talk_to_it_need_no_extra(home: Home, start: Start) -> None:
    folder = ("--home", str(home.path))
    node = start("bootstrap", "--listen", "127.0.0.1", *folder)
    assert node.stdout is not None and "/p2p/" in node.stdout.readline()
    wait_until(lambda: ended(start("status", *folder))[0] == ExitCode.DONE, "status of the node", START_S)
    for words in WITH_A_PEER:
        code, _, err = ended(start(*words, *folder))
        is_refused = words[0] == "pause"  # it does not train
        assert code == (ExitCode.BAD_INPUT if is_refused else ExitCode.DONE) and ("does not train" in err) is is_refused, (words, err)
    assert ended(node)[0] == ExitCode.DONE


@pytest.mark.timeout(120)
def test_an_import_of_the_package_needs_no_extra(tmp_path: Path, start: Start) -> None:
    start("id", "--home", str(tmp_path / "home"))  # writes the finder
    program = "import gossamer, sys; gossamer.host; assert any(type(finder).__name__ == 'Absent' for finder in sys.meta_path)"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-P", "-c", program], env=environment, check=True)


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
