"""`peer join`: every invite that cannot work is refused before anything starts, with a way out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gossamer.peer.machine.home import Home
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.cli.shell import ROOT, Shell

HOST = Identity(b"h" * 32)
HOUR_S = 3600


def invite(subject: PeerId | None = None, lifetime_s: int = HOUR_S) -> str:
    bootstraps = (f"/ip4/127.0.0.1/tcp/4001/p2p/{HOST.peer_id}",)
    return Invite.issue(HOST, b"r" * 32, bootstraps, subject, int(time.time()) + lifetime_s).to_text()


EXPIRED = invite(lifetime_s=-HOUR_S)


def test_an_invite_is_read_from_the_environment(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_INVITE", EXPIRED)
    assert "expired" in shell("join").complaint[0]
    monkeypatch.setenv("GOSSAMER_INVITE", " ")
    assert "empty" in shell("join").complaint[0]


def test_an_invite_file_may_appear_later(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "invite"
    monkeypatch.setattr("gossamer.cli.join.time.sleep", lambda _: file.write_text(EXPIRED + "\n"))
    monkeypatch.setenv("GOSSAMER_INVITE_FILE", str(file))
    result = shell("join")
    assert result.err.startswith(f"waiting for an invite in {file}: there is no such file yet\n")
    assert "expired" in result.complaint[0]


def test_an_invite_file_may_be_empty_at_first(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell leaves it while `peer invite > FILE` starts."""
    (file := tmp_path / "invite").touch()
    monkeypatch.setattr("gossamer.cli.join.time.sleep", lambda _: file.write_text(EXPIRED + "\n"))
    result = shell("join", "--invite-file", file)
    assert f"waiting for an invite in {file}: it is empty\n" in result.err and "expired" in result.complaint[0]


@pytest.mark.parametrize(("redirection", "words"), [("<&-", "stdin is closed"), ("< empty", "stdin has ended")])
def test_stdin_without_an_invite_is_not_waited_for(redirection: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    peer = f"{sys.executable} -P -m gossamer.cli.main join --home home --invite-file /dev/stdin {redirection}"
    done = subprocess.run(peer, shell=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    error, hint = done.stderr.splitlines()[-2:]
    assert done.returncode == 2 and words in error and "--invite-file FILE" in hint
    assert not (tmp_path / "home").exists()


def test_an_invite_is_read_from_stdin(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "invite").write_text(EXPIRED + "\n")
    monkeypatch.setattr("gossamer.cli.join.STDIN", tmp_path / "invite")
    result = shell("join", "--invite-file", tmp_path / "invite")
    assert result.err.startswith("reading the invite from stdin\n") and "expired" in result.complaint[0]


def test_an_invite_for_another_peer_is_refused(shell: Shell) -> None:
    result = shell("join", invite(subject=HOST.peer_id))
    assert result.code == 2 and "the invite is for" in result.complaint[0]


def test_an_invite_of_another_release_is_a_version_mismatch(shell: Shell) -> None:
    assert shell("join", invite().replace("gossamer1", "gossamer2")).code == 10


def test_a_home_that_holds_another_run_is_left_alone(shell: Shell) -> None:
    shell("id")
    held = SignedManifest.sign(Manifest().with_host(HOST.peer_id), HOST).to_bytes()
    Home(shell.home).manifest.write_bytes(held)
    result = shell("join", invite())
    assert result.code == 2
    assert "already holds another run" in result.complaint[0]
    assert Home(shell.home).manifest.read_bytes() == held
