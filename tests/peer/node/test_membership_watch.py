"""Revocations go from peer to peer and end a membership; members get lasting credentials from the issuer, and warn where it is away."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.peer.machine.home import Home
from gossamer.peer.node import membership_watch as module
from gossamer.peer.node.membership_watch import DAY_S, MembershipWatch, latest_credential, membership_warning
from gossamer.peer.swarm import membership
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.issued_invites import IssuedInvite, IssuedInvites
from gossamer.peer.swarm.membership import Membership, OwnCredential
from gossamer.peer.sync import server
from gossamer.peer.sync.server import FetchServer
from gossamer.protocol.errors import BadMessage, BadSignature, RefusalCode, Refused, RunRefusesUs
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.frames import write_unframed
from gossamer.protocol.messages.messages import ContentsKind
from gossamer.protocol.messages.revocations import Revocation, Revocations, read_revocations
from gossamer.protocol.messages.terms import check_member
from gossamer.protocol.run.invite import FOR_THE_RUN, Credential, closing_of
from tests.protocol.samples import ALICE, BOB, DIGEST, ISSUER, MALLORY, NOW_S, RUN_ID, TERMS
from tests.swarm.sybils import HOST, credential_of
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm

INVITES = tiny_manifest(run={"total_steps": 100_000, "access": "invite", "issuers": [str(HOST.peer_id)]})


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    return Swarm(tmp_path, manifest=INVITES)


async def watch_of(peer: Peer) -> MembershipWatch:
    await peer.swarm.until(lambda: peer.peer.member)
    return peer.member.watch


def revocation(swarm: Swarm, name: object, by: object = HOST) -> Revocation:
    return Revocation(swarm.terms.run_id, HOST.peer_id, name, 1_700_000_000).signed(by)  # type: ignore[arg-type]


async def test_a_revoked_invite_ends_the_membership_of_all_its_holders(monkeypatch: pytest.MonkeyPatch, swarm: Swarm) -> None:
    monkeypatch.setattr(module, "ROUND_S", 1e6)  # nobody hears of it from the others
    a, b, guest = (swarm.add() for _ in range(3))
    for peer, invite in ((a, 0), (b, 0), (guest, 1)):
        peer.join_with(credential_of(swarm, peer.identity, invite)).start()
    await swarm.until(lambda: guest.num_completed >= 2)
    await swarm.until(lambda: guest.peer_id in [entry.peer_id for entry in a.book.announced(asyncio.get_running_loop().time())])
    credential = credential_of(swarm, guest.identity, 1)
    watches = [await watch_of(peer) for peer in (a, b)]
    assert credential.bearer is not None
    held = Revocations()
    held.add(revocation(swarm, credential.bearer))
    assert all(watch.take(held.to_bytes()) and not watch.take(held.to_bytes()) for watch in watches)
    assert guest.peer_id not in [entry.peer_id for entry in a.book.live(asyncio.get_running_loop().time())]
    with pytest.raises(Refused, match="revoked"):
        check_member(guest.peer_id, credential, watches[0].terms, swarm.network.now_s())
    check_member(b.peer_id, credential_of(swarm, b.identity, 0), watches[0].terms, swarm.network.now_s())
    count, num_under_way = guest.num_completed, len(guest.node.meetings.active)
    await asyncio.sleep(20.0)
    assert guest.num_completed <= count + num_under_way
    assert a.num_completed and not any(watch.warned for watch in watches)


async def test_a_known_revocation_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of a thousand takes 0.3 s, in which the node does nothing else."""
    verified: list[PeerId] = []
    monkeypatch.setattr(module, "check_revocation", lambda revocation, terms: verified.append(revocation.revoked))
    nothing: Any = SimpleNamespace(terms=replace(TERMS, revocations=Revocations()), book=AddressBook(HOST.peer_id))
    watch, held = MembershipWatch(nothing, nothing, nothing, nothing, nothing, nothing, nothing), Revocations()
    for one in (ALICE, BOB):
        held.add(Revocation(RUN_ID, ISSUER.peer_id, one.peer_id, 1).signed(ISSUER))
        assert watch.take(held.to_bytes())
    assert verified == [ALICE.peer_id, BOB.peer_id]


async def test_only_the_issuers_revocation_ends_a_training_peer(monkeypatch: pytest.MonkeyPatch, swarm: Swarm) -> None:
    monkeypatch.setattr(module, "ROUND_S", 1.0)
    a, b, guest = (swarm.add() for _ in range(3))
    for peer, invite in ((a, 0), (b, 0), (guest, 1)):
        peer.join_with(credential_of(swarm, peer.identity, invite)).start()
    await swarm.until(lambda: guest.num_completed >= 1)
    watch, *known = [await watch_of(peer) for peer in (guest, a, b)]
    monkeypatch.setattr(server, "check_fetch", refuse_members)
    await swarm.until(lambda: "others say" in watch.warned, within_s=60.0)
    monkeypatch.undo()
    monkeypatch.setattr(module, "ROUND_S", 1.0)
    await swarm.until(lambda: not watch.warned, within_s=60.0)
    for one in known:
        one.take(_one(swarm, guest.peer_id, Identity(b"o" * 32).peer_id))
    with pytest.raises(BaseExceptionGroup):
        await swarm.until(lambda: False, within_s=60.0)
    failure, guest.failure = guest.failure, None
    while isinstance(failure, BaseExceptionGroup):
        (failure,) = failure.exceptions
    assert isinstance(failure, RunRefusesUs) and "peer export" in failure.hint and "this key is refused for good" in failure.hint
    assert [one.revoked for one in watch.terms.revocations] == [guest.peer_id], "what is about others is not for it"


@pytest.mark.parametrize(
    ("answer", "is_taken"),
    [
        ({}, True),
        ({"not_after_s": NOW_S + 30 * DAY_S}, False),
        ({"subject": BOB.peer_id}, False),
        ({"issuer": MALLORY.peer_id}, False),
    ],
    ids=["for the run", "with an end", "of another peer", "by another issuer"],
)
async def test_only_a_lasting_credential_of_this_peer_by_its_issuer_is_taken(
    answer: dict[str, Any], is_taken: bool, tmp_path: Path
) -> None:
    ours = Credential(ISSUER.peer_id, ALICE.peer_id, None, NOW_S + DAY_S, DIGEST).signed(ISSUER, RUN_ID)
    given = replace(ours, signature=b"", **{"not_after_s": FOR_THE_RUN, **answer})
    given = given.signed(MALLORY if given.issuer == MALLORY.peer_id else ISSUER, RUN_ID)

    async def document(*_: object) -> bytes:
        return write_unframed(given)

    book = AddressBook(ALICE.peer_id)
    book.add_address(ISSUER.peer_id, "/ip4/192.0.2.1/tcp/1", 0.0)
    held = Membership(ALICE, TERMS, OwnCredential(ours), 100, 1.0, False)
    client: Any = SimpleNamespace(identity=ALICE, run_id=RUN_ID, document=document)
    gossip: Any = SimpleNamespace(book=book, time=SimpleNamespace(now_s=lambda: NOW_S))
    nothing: Any = None
    await MembershipWatch(Home(tmp_path), held, client, gossip, nothing, nothing, nothing)._ask_to_be_named()
    assert held.credential == (given if is_taken else ours)
    assert latest_credential(Home(tmp_path), ours, RUN_ID, ALICE.peer_id) == held.credential
    another = replace(ours, issuer=MALLORY.peer_id)
    assert latest_credential(Home(tmp_path), another, RUN_ID, ALICE.peer_id) == another, "the first issuer may have revoked this peer"


def refuse_members(*_: object) -> None:
    raise Refused(RefusalCode.NOT_INVITED, "I say so")


async def test_revocations_are_received_from_others_and_kept(monkeypatch: pytest.MonkeyPatch, swarm: Swarm) -> None:
    monkeypatch.setattr(module, "ROUND_S", 1.0)
    knows, learns = (swarm.add() for _ in range(2))
    for peer in (knows, learns):
        peer.join_with(credential_of(swarm, peer.identity, 0)).start()
    (await watch_of(knows)).take(_one(swarm))
    await swarm.until(learns.home.revocations.exists, within_s=30.0)
    assert [found.revoked for found in read_revocations(learns.home.revocations.read_bytes())] == [HOST.peer_id]


def _one(swarm: Swarm, *names: PeerId) -> bytes:
    held = Revocations()
    for name in names or (HOST.peer_id,):
        held.add(revocation(swarm, name))
    return held.to_bytes()


async def test_only_an_issuers_revocation_for_this_run_counts(swarm: Swarm) -> None:
    (peer,) = swarm.start(1)
    watch = await watch_of(peer)
    for forged in (
        revocation(swarm, peer.peer_id, by=peer.identity),
        replace(revocation(swarm, peer.peer_id), issuer=peer.peer_id, signature=b"").signed(peer.identity),
        replace(revocation(swarm, peer.peer_id), run_id=b"r" * 32, signature=b"").signed(HOST),
    ):
        held = Revocations()
        held.add(forged)
        with pytest.raises((BadMessage, BadSignature)):
            watch.take(held.to_bytes())
    assert not list(watch.terms.revocations)


async def test_a_member_gets_a_credential_for_the_run_from_its_issuer(monkeypatch: pytest.MonkeyPatch, swarm: Swarm) -> None:
    monkeypatch.setattr(module, "ROUND_S", 1.0)
    member = swarm.add()
    short = replace(credential_of(swarm, member.identity, 0), not_after_s=int(swarm.network.now_s()) + 3 * DAY_S, signature=b"")
    member.join_with(short.signed(HOST, swarm.terms.run_id)).start()
    await watch_of(member)
    now_s = swarm.network.now_s
    server = FetchServer(HOST, swarm.terms, swarm.signed.to_bytes(), now_s, member.member.gossip)
    swarm.network.start_peer(HOST.peer_id, lambda purpose, stream: server.answer(stream))
    member.book.add_address(HOST.peer_id, "/ip4/192.0.2.1/tcp/1", asyncio.get_running_loop().time())
    await swarm.until(member.home.credential.exists, within_s=30.0)
    home, given = member.home, member.member.sources.client.credential.current
    assert given is not None and given.not_after_s == FOR_THE_RUN
    assert given.bearer == short.bearer, "it tells by which invite the member came"
    check_member(member.peer_id, given, swarm.terms, swarm.network.now_s())
    with pytest.raises(Refused):
        check_member(Identity(b"x" * 32).peer_id, given, swarm.terms, swarm.network.now_s())
    assert latest_credential(home, short, swarm.terms.run_id, member.peer_id) == given
    assert latest_credential(home, short, swarm.terms.run_id, HOST.peer_id) == short
    other = replace(credential_of(swarm, member.identity, 5), not_after_s=short.not_after_s, signature=b"").signed(HOST, swarm.terms.run_id)
    assert latest_credential(home, other, swarm.terms.run_id, member.peer_id) == other, "who joins by a new invite shows that"


async def test_a_revoked_member_does_not_come_back_under_a_new_key_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch, swarm: Swarm
) -> None:
    """What `peer revoke PEERID` does to an invite for anybody: it closes the invite; those with a credential in their name stay."""
    monkeypatch.setattr(module, "ROUND_S", 1.0)
    host, member, guest = (swarm.add() for _ in range(3))
    host.identity = HOST
    host.start()
    for peer in (member, guest):
        peer.join_with(credential_of(swarm, peer.identity, 0)).start()
    watches = [await watch_of(peer) for peer in (host, member, guest)]
    await swarm.until(lambda: all(peer.home.credential.exists() for peer in (member, guest)), within_s=120.0)
    bearer = credential_of(swarm, member.identity, 0).bearer
    assert bearer is not None
    assert watches[0].issued.admitted() == {member.peer_id: bearer, guest.peer_id: bearer}
    watches[0].take(_one(swarm, guest.peer_id, closing_of(bearer)))
    await swarm.until(lambda: len(list(watches[1].terms.revocations)) == 2, within_s=60.0)
    again = Identity(b"again" + bytes(27))
    for watch in watches[:2]:
        now_s, terms = swarm.network.now_s(), watch.terms
        with pytest.raises(Refused, match="revoked"):
            check_member(guest.peer_id, watches[2].membership.credential, terms, now_s)
        with pytest.raises(Refused, match="revoked"):
            check_member(again.peer_id, credential_of(swarm, again, 0), terms, now_s)
        check_member(member.peer_id, watches[1].membership.credential, terms, now_s)
    stays = latest_credential(member.home, credential_of(swarm, member.identity, 0), swarm.terms.run_id, member.peer_id)
    assert stays == watches[1].membership.credential, "after a restart too"
    with pytest.raises(BaseExceptionGroup):  # the guest hears of it and ends
        await swarm.until(lambda: False, within_s=60.0)
    guest.failure = None
    before = member.num_completed
    await swarm.until(lambda: member.num_completed > before + 1, within_s=120.0)


async def test_an_invite_for_anybody_closes_when_its_uses_are_taken(monkeypatch: pytest.MonkeyPatch, swarm: Swarm) -> None:
    monkeypatch.setattr(module, "ROUND_S", 1.0)
    host, *members = (swarm.add() for _ in range(3))
    host.identity = HOST
    bearer = credential_of(swarm, HOST, 0).bearer
    assert bearer is not None
    IssuedInvites(host.home).note(bearer, IssuedInvite(2))
    host.start()
    for peer in members:
        peer.join_with(credential_of(swarm, peer.identity, 0)).start()
    terms = (await watch_of(host)).terms
    await swarm.until(lambda: list(terms.revocations), within_s=120.0)
    third = Identity(b"t" * 32)
    with pytest.raises(Refused, match="revoked"):
        check_member(third.peer_id, credential_of(swarm, third, 0), terms, swarm.network.now_s())
    for peer in members:
        check_member(peer.peer_id, peer.member.membership.credential, terms, swarm.network.now_s())
    assert read_revocations(host.home.revocations.read_bytes())


async def test_a_full_disk_ends_no_issuer_that_closes_an_invite(monkeypatch: pytest.MonkeyPatch, swarm: Swarm) -> None:
    monkeypatch.setattr(module, "ROUND_S", 1.0)

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(membership, "write_whole", full)
    host, member = (swarm.add() for _ in range(2))
    host.identity = HOST
    bearer = credential_of(swarm, HOST, 0).bearer
    assert bearer is not None
    IssuedInvites(host.home).note(bearer, IssuedInvite(1))
    host.start()
    member.join_with(credential_of(swarm, member.identity, 0)).start()
    terms = (await watch_of(host)).terms
    await swarm.until(lambda: list(terms.revocations), within_s=120.0)
    count = host.num_completed
    await swarm.until(lambda: host.num_completed > count, within_s=120.0)


def test_the_operator_is_warned_days_before(tmp_path: Path) -> None:
    assert membership_warning(20 * DAY_S, is_unwanted=False) == membership_warning(float("inf"), is_unwanted=False) == ""
    assert "ends in 3 days" in membership_warning(3 * DAY_S, is_unwanted=False)
    assert "ends in 1 day," in membership_warning(3600.0, is_unwanted=False)
    assert "has ended" in membership_warning(-1.0, is_unwanted=False)
    assert "revoked" in membership_warning(20 * DAY_S, is_unwanted=True)


def test_a_damaged_credential_in_the_home_is_like_none(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.credential.write_bytes(b"\xff" * 40)
    assert latest_credential(home, None, b"r" * 32, HOST.peer_id) is None


async def test_a_small_document_does_not_end_the_stream_on_which_weights_come(tmp_path: Path) -> None:
    async with Swarm(tmp_path) as swarm:
        source_peer, asker = swarm.start(2)
        await swarm.until(lambda: source_peer.global_step >= 3)
        client = asker.member.sources.client
        async with client.source(source_peer.peer_id, ()) as source:
            for _ in range(2):
                await source.ask(ContentsKind.STATE, 0, 100)
                assert len((await source.take())[1]) == 100
                assert await client.document(source_peer.peer_id, (), ContentsKind.REVOCATIONS, b"") == b""
