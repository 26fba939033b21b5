"""Every error that can reach a person: its class has an owner and an exit code, and each command that fails says what to do next."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import gossamer
from gossamer.cli.main import VERBS, report_failure
from gossamer.protocol.errors import ExitCode, GossamerError, OperatorError
from tests.cli.shell import Shell

EXIT_CODES = {
    ExitCode.OUR_FAULT: {
        "GossamerError", "PeerMisbehaved", "BadMessage", "BadSignature", "Refused",  # caught before they reach a person
        "NoUse", "NothingNew", "RankFell", "RankGone", "Overload",  # likewise
        "ChildFailed",  # until its child names another
        "Unhealthy",  # what programs that watch over others expect
    },
    ExitCode.BAD_INPUT: {
        "OperatorError", "BadInvite", "BadManifest", "BadSettings", "NobodyRuns", "HomeInUse", "Diverged", "MeasureFailed",
    },
    ExitCode.SWARM_UNREACHABLE: {"TransportError", "Unreachable", "ConnectionEnded", "PeerGone", "SwarmUnreachable"},
    ExitCode.REFUSED_BY_RUN: {"RunRefusesUs"},
    ExitCode.VERSION_MISMATCH: {"WrongVersion"},
}  # fmt: skip


def classes(of: type[GossamerError] = GossamerError) -> Iterator[type[GossamerError]]:
    """Yield an error and every one that is derived from it, in all modules of the product."""
    for module in pkgutil.walk_packages(gossamer.__path__, "gossamer."):
        if not module.name.endswith(("._compiled", ".kernels")):  # a library of C, which is no module; the kernels need triton
            importlib.import_module(module.name)
    found = [of]
    for one in found:
        found += one.__subclasses__()
    yield from (one for one in found if one.__module__.startswith("gossamer."))


def test_every_error_has_its_exit_code() -> None:
    found: dict[ExitCode, set[str]] = {}
    for one in classes():
        found.setdefault(one.exit_code, set()).add(one.__name__)
    assert found == EXIT_CODES


@pytest.mark.parametrize("error", list(classes(OperatorError)), ids=lambda error: error.__name__)
def test_an_error_of_the_operator_is_reported_with_its_hint(error: type[OperatorError], capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.signature(error).parameters["hint"].default is inspect.Parameter.empty, "mypy holds every place that raises it to it"
    assert report_failure(error("what is wrong", hint="what to do")) is error.exit_code
    assert capsys.readouterr() == ("", "error: what is wrong\nhint: what to do\n")


COMMANDS: dict[str, list[tuple[tuple[str, ...], str, str]]] = {  # by verb: arguments, words of the error, words of the hint
    "demo": [(("--peers", "1"), "--peers", "--help"), (("--codec", "modul4"), "modul4", "modulo4")],
    "init": [(("FILE", "--codec", "modul4"), "modul4", "modulo4"), (("FILE", "--lora", "8"), "a model that exists", "--from FOLDER")],
    "host": [
        (("--port", "70000"), "--port", "--help"),
        (("absent.toml",), "absent.toml", "peer init"),
        (("--max-upload", "fast"), "max_upload", "rate"),
        (("--checkpoint-every", "2x"), "'--checkpoint-every': there is no unit 'x'; write it like 30m", "5min"),
        (("--write-invite", "/nowhere/at/all"), "/nowhere/at/all", "folder"),
    ],
    "join": [
        ((), "holds no run", "peer join gossamer1"),
        (("hello",), "not an invite", "copy the whole line"),
        (("",), "empty", "gossamer1"),
        (("hello", "--invite-file", "FILE"), "file", "leave out one"),
        (("--invite-file", "FOLDER"), "cannot be read: Is a directory", "one line"),
    ],
    "invite": [((), "holds no run", "peer host")],
    "revoke": [(("hello",), "holds no run", "--home DIR")],
    "bootstrap": [((), "holds no run", "peer bootstrap gossamer1"), (("hello",), "starts with gossamer1", "copy the whole line")],
    "status": [((), "no peer is running", "peer join"), (("--json",), "no peer is running", "peer join")],
    "run": [((), "holds no run", "peer join"), (("--json",), "holds no run", "--home")],
    "peers": [((), "no peer is running", "peer join")],
    "logs": [(("--level", "loud"), "no level 'loud'", "warning"), ((), "no peer has run", "--home")],
    "watch": [(("--wings",), "--wings", "--help")],
    "dashboard": [
        (("--port", "-1"), "--port", "--help"),
        (("--public", "8080"), "holds no run", "--home"),
        (("--invite",), "holds no run", "--home"),
    ],
    "credit": [((), "holds no run", "--home"), (("--verify", "nothing"), "cannot be read", "peer credit")],
    "config": [
        (("thread", "2"), "thread", "did you mean 'threads'"),
        (("threads", "many"), "threads", "Processor threads"),
        (("schedule", "22-07"), "schedule", "When to train"),
        (("--unset",), "--unset", "peer config"),
    ],
    "pause": [((), "no peer is running", "peer join"), (("2hors",), "2hors", "30m, 2h or 2 days")],
    "resume": [((), "no peer is running", "peer join")],
    "leave": [((), "no peer is running", "peer join")],
    "doctor": [(("--listen", ""), "listen", "Address"), (("absent.toml",), "absent.toml: No such file", "peer init")],
    "service": [(("status",), "no service", "peer service install"), (("install",), "holds no run", "gossamer1")],
    "backup": [((), "FILE", "--help"), (("FILE.backup",), "holds no peer", "--home DIR")],
    "restore": [((), "FILE", "--help"), (("FILE.absent",), "does not exist", "--help"), ((__file__,), "no terminal", "--passphrase-file")],
    "generate": [((), "holds no run", "--home DIR"), (("--temperature", "-1"), "--temperature", "likeliest")],
    "export": [((), "FOLDER", "--help"), (("FILE.out",), "holds no run", "--home DIR")],
    "eval": [((), "holds no run", "--home DIR")],
    "compare": [(("FOLDER",), "unexpected", "--help")],
    "simulate": [(("--codec", "modul4"), "modul4", "modulo4")],
    "id": [(("--wings",), "--wings", "--help")],
    "man": [((), "--home", "--help")],
}
ROWS = [(verb, *row) for verb in COMMANDS for row in COMMANDS[verb]]


def test_the_table_of_bad_commands_covers_every_verb() -> None:
    assert set(COMMANDS) == set(VERBS)


@pytest.mark.parametrize(("verb", "arguments", "error", "hint"), ROWS, ids=[" ".join((verb, *arguments)) for verb, arguments, *_ in ROWS])
def test_a_bad_command_fails_with_error_and_hint(
    verb: str, arguments: tuple[str, ...], error: str, hint: str, shell: Shell, tmp_path: Path
) -> None:
    result = shell(
        verb, *(str(tmp_path) if text == "FOLDER" else str(tmp_path / text) if text.startswith("FILE") else text for text in arguments)
    )
    assert (result.code, result.out) == (ExitCode.BAD_INPUT, "")
    assert error in result.complaint[0] and hint in result.complaint[1], result.err
    assert "internal error" not in result.err
