"""The command line as a whole: help, exit codes, speed, and errors that a person can act on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cli import main
from cli.main import run
from peer.machine.status import VERSION
from protocol.errors import ExitCode, RunRefusesUs, SwarmUnreachable, WrongVersion
from tests.cli.shell import Shell

VERBS = ("demo", "init", "host", "join", "invite", "bootstrap", "status", "leave", "export", "eval", "id")


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n  {verb} " in shown


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_and_takes_a_home(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == ExitCode.DONE
    assert "--home DIR" in capsys.readouterr().out


def test_no_verb_shows_the_help_and_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == ExitCode.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: peer" in captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == ExitCode.DONE
    assert capsys.readouterr().out == f"{VERSION}\n"


@pytest.mark.parametrize("arguments", [["fly"], ["id", "--wings"], ["host", "--port", "70000"], ["demo", "--peers", "1"], ["export"]])
def test_what_is_not_understood_is_bad_input(arguments: list[str], shell: Shell) -> None:
    said = shell(*arguments)
    assert said.code == ExitCode.BAD_INPUT
    assert said.out == ""
    assert "--help" in said.complaint[1]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (SwarmUnreachable("nobody there", hint="wait"), 3),
        (RunRefusesUs("not invited", hint="ask"), 4),
        (WrongVersion("too old", hint="install"), 10),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("oops"), 1),
    ],
)
def test_the_exit_code_says_whose_fault_it_was(failure: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise failure

    monkeypatch.setattr(main, "app", fail)
    assert run(["id"]) == code


def test_a_bug_of_ours_shows_where_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(main, "app", fail)
    run(["id"])
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "error: internal error: ZeroDivisionError('oops')" in said


def test_help_loads_nothing_that_is_slow_to_import() -> None:
    loaded = "import sys; from cli.main import run; run(['--help']); sys.exit(bool({'torch', 'hivemind', 'grpc'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", loaded], check=True, stdout=subprocess.DEVNULL, timeout=30)
