"""The command line as a whole: help, exit codes, speed, and errors that a person can act on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import typer

from gossamer.cli import main
from gossamer.cli.main import GROUPS, VERBS, report_failure, run
from gossamer.peer.machine.status import VERSION
from gossamer.protocol.errors import ExitCode, PeerGone, RunRefusesUs, SwarmUnreachable, WrongVersion
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from tests.cli.shell import Shell
from tests.peer.waiting import wait_until


def test_help_lists_every_verb_in_a_group_and_cuts_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    for title, verbs in GROUPS.items():
        part = shown.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert all(f"  {verb} " in f"\n{part}" for verb in verbs), part
    assert "..." not in shown.partition("Try it:")[2]
    assert max(map(len, shown.splitlines())) <= 80


def test_the_shell_completes_verbs_and_options() -> None:
    def completed(words: str, place: int) -> list[str]:
        asking = {"_PEER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        program = "import sys; from gossamer.cli.main import run; sys.exit(run([]))"
        done = subprocess.run([sys.executable, "-c", program], env=os.environ | asking, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("peer ex", 1) == ["export"]
    assert "--max-upload" in completed("peer join --max", 2)


def test_a_wrong_value_is_answered_with_what_the_option_takes(shell: Shell, tmp_path: Path) -> None:
    for arguments, words in (
        (("host", "--data", tmp_path / "none"), "Text file, or folder of text files"),
        (("demo", "--peers", "1"), "Peers in the swarm"),
    ):
        hint = shell(*arguments).complaint[1]
        assert words in hint and f"`peer {arguments[0]} --help`" in hint


@pytest.mark.parametrize("verb", ["join", "host", "config", "status", "logs", "eval", "leave", "invite", "service"])
def test_a_file_is_no_home_and_is_not_to_be_deleted(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "passwd").write_text("root")
    shell = Shell(tmp_path / "passwd", capsys)
    result = shell(verb, *(("status",) if verb == "service" else ()))
    assert result.code == ExitCode.BAD_INPUT
    assert "delete" not in result.err


@pytest.mark.parametrize(
    ("verb", "name"), [("host", "manifest.bin"), ("join", "manifest.bin"), ("run", "manifest.bin"), ("peers", "partners.json")]
)
def test_a_folder_where_a_file_belongs_is_named_with_what_to_do(verb: str, name: str, shell: Shell) -> None:
    shell("id")
    (shell.home / name).mkdir()
    result = shell(verb)
    assert (result.code, result.out) == (ExitCode.BAD_INPUT, "")
    assert name in result.complaint[0] and "s a directory" in result.complaint[0]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "man"])
def test_every_verb_explains_itself_and_takes_a_home(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "--home DIR" in shown and "<" not in shown.partition("Arguments:\n")[2].partition("\n\n")[0]


def test_no_verb_shows_the_help_and_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == ExitCode.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: peer" in captured.err


def test_an_invite_leaves_the_command_line() -> None:
    invite = "gossamer1" + "a2" * 100
    for pasted in (invite, invite.upper(), f"'{invite}'", f" {invite[:50]}\n{invite[50:]}\n", f"gossamer:{invite}"):
        command = ["-P", "-m", "gossamer.cli.main", "join", pasted, "--home", "gossamer1"]
        assert main.without_invite(command) == (["-P", "-m", "gossamer.cli.main", "join", "--home", "gossamer1"], pasted)
    for command in (["join"], ["join", "gossamer1aaaa"], ["join", invite, "--data", invite]):
        assert main.without_invite(command) == (command, "")


def test_a_command_that_waits_shows_no_invite_in_its_command_line(tmp_path: Path) -> None:
    """The checksum is right and the run is unreachable: `peer join` keeps trying."""
    host = Identity(b"h" * 32)
    invite = Invite.issue(host, b"r" * 32, (f"/ip4/127.0.0.1/tcp/9/p2p/{host.peer_id}",), None, int(time.time()) + 3600).to_text()
    command = [sys.executable, "-P", "-m", "gossamer.cli.main", "join", invite, "--keep-trying", "--listen", "127.0.0.1"]
    with subprocess.Popen([*command, "--home", str(tmp_path / "home")], stderr=subprocess.DEVNULL) as joining:
        process = psutil.Process(joining.pid)

        def started() -> list[psutil.Process]:
            """Return the children; one that is forked and not yet its program has the parent's command line and environment."""
            return [child for child in process.children(recursive=True) if child.cmdline() != process.cmdline()]

        try:
            wait_until((tmp_path / "home" / "running.json").exists, "control socket", 60)
            family = [process, *wait_until(started, "children", 60)]
            assert not any(invite in word for one in family for word in one.cmdline())
            assert "join" in process.cmdline()
            assert not any(invite in one.environ().values() for one in family[1:])
        finally:
            joining.terminate()
            joining.wait(30)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == ExitCode.DONE
    assert capsys.readouterr().out == f"{VERSION}\n"


def test_an_unknown_verb_is_bad_input(shell: Shell) -> None:
    result = shell("fly")
    assert (result.code, result.out) == (ExitCode.BAD_INPUT, "") and "--help" in result.complaint[1]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (SwarmUnreachable("nobody there", hint="wait"), 3),
        (RunRefusesUs("not invited", hint="ask"), 4),
        (WrongVersion("too old", hint="install"), 10),
        (KeyboardInterrupt(), 130),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (OSError(errno.EIO, "Input/output error"), 1),
        (ZeroDivisionError("oops"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_code(failure: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(verbs: object) -> None:
        raise failure

    monkeypatch.setattr(main, "command_line", fail)
    assert run(["id"]) == code


def test_an_internal_error_prints_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(verbs: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(main, "command_line", fail)
    run(["id"])
    result = capsys.readouterr().err
    assert "Traceback" in result
    assert "error: internal error: ZeroDivisionError('oops')" in result


def test_a_full_disk_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    report_failure(OSError(errno.ENOSPC, "No space left on device", "/home/me/.gossamer/invites.new"))
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: /home/me/.gossamer/invites.new: No space left on device" and "free some space" in hint


def test_no_empty_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure(PeerGone("the partner is gone")) is ExitCode.SWARM_UNREACHABLE
    assert capsys.readouterr().err == "error: the partner is gone\n"


def test_usage_errors_read_like_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure(typer.BadParameter("Must be a number.")) is ExitCode.BAD_INPUT
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: invalid value: Must be a number")
    assert not error.endswith(".")
    assert "--help" in hint


def test_help_loads_nothing_that_is_slow_to_import() -> None:
    loaded = (
        "import sys; from gossamer.cli.main import run; run(['--help']); sys.exit(bool({'torch', 'hivemind', 'grpc'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", loaded], check=True, stdout=subprocess.DEVNULL, timeout=30)


def test_status_imports_no_slow_package(tmp_path: Path) -> None:
    slow = "{'asyncio', 'rich', 'hivemind'}"
    program = f"import sys; from gossamer.cli.main import run; run(sys.argv[1:]); sys.exit(bool({slow} & set(sys.modules)))"
    command = [sys.executable, "-c", program, "status", "--home", str(tmp_path)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=30)
