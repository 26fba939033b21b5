"""The invite with which a peer comes to a run, and comes again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gossamer.peer.machine.held_manifest import checked_invite
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadInvite
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest

HOST = Identity(b"h" * 32)
SIGNED = SignedManifest.sign(Manifest().with_host(HOST.peer_id), HOST)


def invite(address: str) -> str:
    return Invite.issue(HOST, SIGNED.run_id, (f"/ip4/{address}/tcp/4001/p2p/{HOST.peer_id}",), None, int(time.time()) - 3600).to_text()


def test_a_member_starts_again_with_its_invite_after_that_has_expired(tmp_path: Path) -> None:
    """A script or a container names the invite at each start; the issuer has given it a membership that lasts."""
    home, expired = Home(tmp_path / "home"), invite("192.0.2.1")
    with pytest.raises(BadInvite, match="expired"):
        checked_invite(home, expired, "", "")
    home.invite.write_text(f"{expired}\n")
    with pytest.raises(BadInvite, match="expired"):  # it has never come in
        checked_invite(home, expired, "", "")
    home.manifest.write_bytes(SIGNED.to_bytes())
    identity, read = checked_invite(home, f"gossamer:{expired}", "", "")
    assert read is not None and read.to_text() == expired
    assert identity.peer_id == Identity.load_or_create(home.identity).peer_id
    with pytest.raises(BadInvite, match="expired"):
        checked_invite(home, invite("192.0.2.2"), "", "")
