"""`peer invite`: who may write one, for whom, for how long, and where it leads."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.cli.invite import issued_to_anybody, lifetime_s
from gossamer.peer.machine.events import MemberSeen
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import MemberView, RunView
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.issued_invites import USES, IssuedInvites
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.cli.running import ADDRESS, Running
from tests.cli.shell import Shell

OTHER, GUEST, STRANGER = (Identity(letter * 32).peer_id for letter in (b"o", b"g", b"s"))


@pytest.fixture
def me(host: Identity) -> PeerId:
    return host.peer_id


def remember(home: Path, peer: PeerId) -> str:
    """Let the home's peer have learnt of another one, from its record; returns the address with the id that a record leaves out."""
    book = AddressBook(Identity(b"n" * 32).peer_id)
    book.learn(MemberRecord(b"r" * 32, peer, (ADDRESS,), 5, False, 1, int(time.time()) + 60), time.time())
    Home(home).peers.write_bytes(book.to_bytes(time.time()))
    return f"{ADDRESS}/p2p/{peer}"


def test_the_invite_of_a_running_peer_holds_its_own_addresses(shell: Shell, me: PeerId) -> None:
    peer = Running(shell)
    peer.status = replace(peer.status, addresses=[f"{ADDRESS}/p2p/{me}"])
    invite = Invite.from_text(peer.during(lambda: shell("invite")).out)
    assert invite.bootstraps == tuple(peer.status.addresses)
    assert invite.credential.subject is None
    invite.check(OTHER, time.time() + 29 * 24 * 3600)


@pytest.mark.parametrize("uses", [0, -1])
def test_an_invite_of_a_program_admits_somebody(uses: int, tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match=f"an invite for {uses} peers admits nobody"):
        issued_to_anybody(Home(tmp_path), Identity(b"h" * 32), bytes(32), (f"{ADDRESS}/p2p/{OTHER}",), uses)


def test_the_invite_of_a_stopped_peer_holds_addresses_of_known_peers(shell: Shell, me: PeerId) -> None:
    address = remember(shell.home, OTHER)
    assert Invite.from_text(shell("invite").out).bootstraps == (address,)


def test_an_invite_holds_addresses_of_as_many_peers_as_fit(shell: Shell, me: PeerId) -> None:
    met = [Identity(bytes([number]) * 32).peer_id for number in range(1, 8)]
    book = AddressBook(me)
    for peer in met:
        for address in ("/near/4Vq9", "/ip4/192.168.0.7/tcp/4001", "/ip4/203.0.113.7/tcp/4001", "/ip4/5.5.0.1/tcp/4001"):
            book.add_address(peer, address, 0.0)
    Home(shell.home).peers.write_bytes(book.to_bytes(0.0))
    own = [f"/ip4/5.5.0.{number}/tcp/4001/p2p/{me}" for number in range(5)]
    running = Running(shell)
    running.status = replace(running.status, addresses=own)
    invite = Invite.from_text(running.during(lambda: shell("invite")).out)
    assert not any("near" in address for address in invite.bootstraps), "nobody opens it who is not there yet"
    assert invite.bootstraps == (*own[:3], *(f"/ip4/5.5.0.1/tcp/4001/p2p/{peer}" for peer in met[:5]))


def test_each_invite_is_another_one_even_within_a_second(shell: Shell, me: PeerId, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(shell.home, OTHER)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    written = [Invite.from_text(shell("invite", "--uses", "1").out) for _ in range(3)]
    assert len({invite.credential.bearer for invite in written}) == 3


def test_an_invite_may_include_a_bootstrap_node(shell: Shell, me: PeerId) -> None:
    seed = f"/dns4/seed.example.org/tcp/4001/p2p/{Identity(b's' * 32).peer_id}"
    known = remember(shell.home, OTHER)
    assert Invite.from_text(shell("invite", "--also", seed).out).bootstraps == (seed, known)
    assert shell("invite", "--also", "seed.example.org:4001").code == 2


def test_an_invite_may_be_for_one_peer_and_short(shell: Shell, me: PeerId) -> None:
    remember(shell.home, OTHER)
    answer = json.loads(shell("invite", "--for", str(OTHER), "--expires", "90m", "--json").out)
    invite = Invite.from_text(answer["invite"])
    assert invite.credential.subject == OTHER
    assert abs(invite.credential.not_after_s - time.time() - 90 * 60) < 60
    assert answer["run_id"] == invite.run_id.hex()


def test_only_issuers_may_write_invites(shell: Shell) -> None:
    shell("id")
    host = Identity(b"h" * 32)
    Home(shell.home).manifest.write_bytes(SignedManifest.sign(Manifest().with_host(host.peer_id), host).to_bytes())
    result = shell("invite")
    assert result.code == 2
    assert "run.issuers" in result.complaint[1]


@pytest.mark.parametrize(("access", "words"), [("allowlist", "for the members that the manifest lists"), ("open", "for everybody")])
def test_an_invite_to_a_run_that_needs_none_says_who_may_join(access: str, words: str, shell: Shell) -> None:
    shell("id")
    manifest = Manifest.checked({"run": {"access": access, "members": [str(OTHER)] * (access == "allowlist")}})
    Home(shell.home).manifest.write_bytes(SignedManifest.sign(manifest, Identity.load_or_create(Home(shell.home).identity)).to_bytes())
    remember(shell.home, OTHER)
    assert words in shell("invite").err
    assert shell("invite", "--for", str(OTHER)).code == 0
    stranger = shell("invite", "--for", str(Identity(b"s" * 32).peer_id))
    assert (stranger.code == 2) is (access == "allowlist")
    listed = shell("invite", "--list").out
    assert "one peer" in listed and "revoke" not in listed, "membership needs no invite"


def test_an_invite_without_a_run_is_refused(shell: Shell) -> None:
    assert shell("invite").code == 2


def test_an_invite_without_a_bootstrap_address_is_refused(shell: Shell, me: PeerId) -> None:
    result = shell("invite")
    assert result.code == 2
    assert "no bootstrap address" in result.complaint[0]


def test_a_wrong_id_is_named(shell: Shell, me: PeerId) -> None:
    remember(shell.home, OTHER)
    assert "12D3Oops" in shell("invite", "--for", "12D3Oops").complaint[0]


def test_an_invite_lasts_a_second_at_least() -> None:
    assert (lifetime_s("1.5h"), lifetime_s("1s")) == (5400, 1)
    for text in ("0d", "0.5s", "30"):
        with pytest.raises(BadSettings):
            lifetime_s(text)


def test_an_invite_for_anybody_is_limited_and_says_so(shell: Shell, me: PeerId) -> None:
    remember(shell.home, OTHER)
    for arguments, uses in ((("invite", "--expires", "1d"), USES), (("invite", "--uses", "3"), 3)):
        result = shell(*arguments)
        bearer = Invite.from_text(result.out).credential.bearer
        assert bearer is not None and IssuedInvites(Home(shell.home)).uses()[bearer] == uses
        assert f"up to {uses} peers" in result.err


def seen(home: Home, peer: PeerId) -> None:
    """Let the home's peer have seen a member in its run."""
    view = RunView(members={str(peer): MemberView(MemberSeen(str(peer), "training", 1, 9.0, 5, 100), 1.0, 1.0)})
    home.run.write_text(json.dumps(view.to_record()))


def test_the_list_says_of_each_invite_for_whom_it_is_who_has_used_it_and_whether_it_is_open(shell: Shell, me: PeerId) -> None:
    home = Home(shell.home)
    assert "has issued no invite" in shell("invite", "--list").out
    remember(shell.home, OTHER)
    written = [
        json.loads(shell("invite", "--json", *words).out) for words in ((), ("--uses", "1"), ("--expires", "1s"), ("--for", str(OTHER)))
    ]
    first, second, *_ = names = [PeerId.from_text(one["id"]) for one in written]
    assert IssuedInvites(home).admit(GUEST, first) and IssuedInvites(home).admit(STRANGER, second)
    seen(home, OTHER)
    shell("revoke", str(GUEST))
    home.invites.write_text(home.invites.read_text().replace(f'"expires_s": {written[2]["not_after_s"]}', '"expires_s": 9'))
    answer = json.loads(shell("invite", "--list", "--json").out)
    assert answer["run_id"] == written[0]["run_id"]
    assert [(row["for"], row["uses"], row["state"]) for row in answer["invites"]] == [
        (None, USES, "closed"), (None, 1, "used up"), (None, USES, "expired"), (str(OTHER), 1, "open")
    ]  # fmt: skip
    assert [row["members"] for row in answer["invites"]] == [
        [{"peer_id": str(GUEST), "is_revoked": True}],
        [{"peer_id": str(STRANGER), "is_revoked": False}],
        [],
        [{"peer_id": str(OTHER), "is_revoked": False}],
    ]
    assert all(abs(row["issued"] - time.time()) < 60 for row in answer["invites"])
    assert [row["expires"] for row in answer["invites"]] == [*(one["not_after_s"] for one in written[:2]), 9, written[3]["not_after_s"]]
    lines = shell("invite", "--list").out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == [name.short() for name in names]
    assert f"{GUEST.short()} (revoked)" in lines[1] and "1 of 16" in lines[1] and "one peer" in lines[4]


def test_an_invite_of_an_earlier_release_is_listed_without_dates(shell: Shell, me: PeerId) -> None:
    Home(shell.home).invites.write_text(json.dumps({str(OTHER): 3}))
    [row] = json.loads(shell("invite", "--list", "--json").out)["invites"]
    assert (row["id"], row["uses"], row["issued"], row["expires"], row["state"]) == (str(OTHER), 3, None, None, "open")
    assert "0 of 3  -  " in shell("invite", "--list").out


def test_a_list_writes_no_invite(shell: Shell, me: PeerId) -> None:
    assert "--list writes no invite" in shell("invite", "--list", "--for", str(OTHER)).complaint[0]
    assert not Home(shell.home).invites.exists()


def test_an_invite_for_one_peer_has_no_number_of_uses(shell: Shell, me: PeerId) -> None:
    remember(shell.home, OTHER)
    assert "alone" in shell("invite", "--for", str(OTHER)).err
    assert not IssuedInvites(Home(shell.home)).uses()
    assert "--uses" in shell("invite", "--for", str(OTHER), "--uses", "3").complaint[0]
