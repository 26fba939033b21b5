"""What a start leaves in the home folder, over stand-ins; with real processes: test_supervisor_real.py."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import StateChanged, read_events
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status
from gossamer.peer.supervisor import supervisor as module
from gossamer.peer.supervisor.children import ChildFailed
from gossamer.peer.supervisor.supervisor import Supervisor
from gossamer.peer.swarm.issued_invites import IssuedInvite, IssuedInvites
from gossamer.protocol.errors import ExitCode
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.peer.supervised import PROGRAMS


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(module, "Supervisor", partial(Supervisor, programs=PROGRAMS))
    folder = Home(tmp_path / "home")
    folder.create()
    (folder.path / "node.does").write_text("serve")
    return folder


def run_of(home: Home, codec: str = "int8") -> SignedManifest:
    identity = Identity.load_or_create(home.identity)
    return SignedManifest.sign(Manifest.checked({"codec": {"name": codec}}).with_host(identity.peer_id), identity)


def host(home: Home, signed: SignedManifest | None, trainer: str) -> Status:
    (home.path / "trainer.does").write_text(trainer)
    identity = Identity.load_or_create(home.identity)
    return asyncio.run(module.run_peer(PeerConfig(home=home.path, alone=True), identity, signed, None, lambda status: None))


def test_a_new_run_that_cannot_begin_leaves_the_home_free(home: Home) -> None:
    with pytest.raises(ChildFailed) as caught:
        host(home, run_of(home), "operator")
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert not home.manifest.exists()
    assert not home.running.exists()


def test_a_run_that_was_there_before_stays_whatever_fails(home: Home) -> None:
    signed = run_of(home)
    home.manifest.write_bytes(signed.to_bytes())
    for given in (signed, None):
        with pytest.raises(ChildFailed):
            host(home, given, "operator")
        assert home.manifest.read_bytes() == signed.to_bytes()


def test_a_new_run_stays_once_its_invite_is_out(home: Home) -> None:
    signed = run_of(home)
    IssuedInvites(home).note(Identity(b"b" * 32).peer_id, IssuedInvite(2))
    with pytest.raises(ChildFailed):
        host(home, signed, "operator")
    assert home.manifest.read_bytes() == signed.to_bytes()


def test_a_new_run_that_has_begun_stays(home: Home) -> None:
    signed = run_of(home)
    (home.path / "trainer.ends").touch()
    assert host(home, signed, "train").state == "done"
    assert home.manifest.read_bytes() == signed.to_bytes()
    assert home.manifest.stat().st_mode & 0o77 == 0
    assert any(isinstance(event, StateChanged) for event in read_events(home.events))
