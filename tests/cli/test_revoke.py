"""`peer revoke`: who may take back what, and what is kept of it."""

from __future__ import annotations

import json
import time

import pytest

from gossamer.peer.machine.home import Home
from gossamer.peer.swarm.issued_invites import IssuedInvites
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.revocations import read_revocations
from gossamer.protocol.run.invite import Invite, closing_of
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.cli.shell import Shell

GUEST, STRANGER = Identity(b"g" * 32), Identity(b"s" * 32)
ADDRESS = f"/ip4/203.0.113.5/tcp/4001/p2p/{GUEST.peer_id}"


def run_id(shell: Shell) -> bytes:
    return SignedManifest.from_bytes(Home(shell.home).manifest.read_bytes()).run_id


def test_an_invite_and_a_member_are_revoked_once_each(shell: Shell, host: Identity) -> None:
    invite = Invite.issue(host, run_id(shell), (ADDRESS,), None, int(time.time()) + 3600)
    result = shell("revoke", invite.to_text())
    assert result.code == 0 and "the invite is revoked" in result.out
    assert "already revoked" in shell("revoke", invite.to_text()).out
    answer = json.loads(shell("revoke", str(GUEST.peer_id), "--json").out)
    assert answer == {"revoked": [str(GUEST.peer_id)], "is_new": True, "run_id": run_id(shell).hex()}
    kept = read_revocations(Home(shell.home).revocations.read_bytes())
    assert {revocation.revoked for revocation in kept} == {GUEST.peer_id, invite.credential.bearer}
    for revocation in kept:
        revocation.verify(host.peer_id)


def revoked(shell: Shell) -> set[PeerId]:
    return {revocation.revoked for revocation in read_revocations(Home(shell.home).revocations.read_bytes())}


def test_revoking_a_member_closes_the_invite_for_anybody_by_which_it_came(shell: Shell, host: Identity) -> None:
    bearer = Invite.issue(host, run_id(shell), (ADDRESS,), None, int(time.time()) + 3600).credential.bearer
    assert bearer is not None
    for peer in (GUEST, STRANGER):
        IssuedInvites(Home(shell.home)).admit(peer.peer_id, bearer)
    assert "that came by it and stay: 1" in shell("revoke", str(GUEST.peer_id)).out
    assert revoked(shell) == {GUEST.peer_id, closing_of(bearer)}


def test_a_member_is_named_as_other_commands_show_it(shell: Shell, host: Identity) -> None:
    IssuedInvites(Home(shell.home)).admit(GUEST.peer_id, STRANGER.peer_id)
    assert "0 invites or members" in shell("revoke", "abcdef").complaint[0]
    assert shell("revoke", str(GUEST.peer_id)[-6:]).code == 0
    assert GUEST.peer_id in revoked(shell)


@pytest.mark.parametrize("num_chars", [6, 52], ids=["short", "whole"])
def test_an_invite_whose_text_is_lost_is_revoked_by_its_id(num_chars: int, shell: Shell, host: Identity) -> None:
    first, second, third = (
        json.loads(shell("invite", "--json", "--also", ADDRESS, *words).out)["id"] for words in ((), (), ("--for", str(GUEST.peer_id)))
    )
    assert "every membership that came from it" in shell("revoke", first[-num_chars:]).out
    assert "its members stay" in shell("revoke", second[-num_chars:], "--keep-members").out
    assert revoked(shell) == {PeerId.from_text(first), closing_of(PeerId.from_text(second))}
    refused = shell("revoke", third[-num_chars:], "--keep-members")
    assert refused.code == 2 and "is one peer" in refused.complaint[0]
    assert f"the invite for {GUEST.peer_id.short()} and its membership are revoked" in shell("revoke", third[-num_chars:]).out
    assert GUEST.peer_id in revoked(shell)


def test_no_invite_is_written_for_a_revoked_peer(shell: Shell, host: Identity) -> None:
    shell("revoke", str(GUEST.peer_id))
    result = shell("invite", "--for", str(GUEST.peer_id), "--also", ADDRESS)
    assert (result.code, result.out) == (2, "")
    assert "is revoked for good" in result.complaint[0] and "another key" in result.complaint[1]
    assert shell("invite", "--for", str(STRANGER.peer_id), "--also", ADDRESS).code == 0


def test_a_member_that_may_return_is_reported(shell: Shell, host: Identity) -> None:
    assert "or it returns under another key" in shell("revoke", str(GUEST.peer_id)).out


def test_an_invite_is_closed_and_its_members_stay(shell: Shell, host: Identity) -> None:
    invite = Invite.issue(host, run_id(shell), (ADDRESS,), None, int(time.time()) + 3600)
    assert "its members stay" in shell("revoke", invite.to_text(), "--keep-members").out
    assert invite.credential.bearer is not None
    assert revoked(shell) == {closing_of(invite.credential.bearer)}


def test_only_the_issuer_may_revoke_an_invite(shell: Shell, host: Identity) -> None:
    for issuer, run in ((STRANGER, run_id(shell)), (host, b"r" * 32)):
        result = shell("revoke", Invite.issue(issuer, run, (ADDRESS,), None, int(time.time()) + 3600).to_text())
        assert result.code == 2 and result.complaint
    assert not Home(shell.home).revocations.exists()


def test_only_a_host_of_a_run_with_invites_revokes(shell: Shell) -> None:
    shell("id")
    assert shell("revoke", str(GUEST.peer_id)).code == 2
    manifest = SignedManifest.sign(Manifest().with_host(STRANGER.peer_id), STRANGER)
    Home(shell.home).manifest.write_bytes(manifest.to_bytes())
    assert "ask the peer that wrote" in shell("revoke", str(GUEST.peer_id)).complaint[1]
    Home(shell.home).manifest.write_bytes(SignedManifest.sign(Manifest.checked({"run": {"access": "open"}}), STRANGER).to_bytes())
    assert "open" in shell("revoke", str(GUEST.peer_id)).complaint[0]


def test_text_that_is_neither_invite_nor_peer_id_is_refused(shell: Shell, host: Identity) -> None:
    assert "12D3Oops" in shell("revoke", "12D3Oops").complaint[0]
