"""Peer exchange: only records that are signed, valid and of a member of this run are accepted, and only useful ones are passed on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from gossamer.peer.swarm.address_book import MAX_ENTRIES, AddressBook
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.peer_exchange import LAST_WORD_S, PeerExchange
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.limits import CLOCK_SKEW_S, MAX_LISTED, RECORD_LIFETIME_S
from gossamer.protocol.memory.virtual_time import run
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.replies import PEER_LIST_BYTES, PeerList
from gossamer.protocol.messages.terms import RunTerms
from gossamer.protocol.tasks import loop_s
from tests.protocol.samples import ALICE, BEARER, BOB, ISSUED, ISSUER, MALLORY, NOW_S, OTHER_RUN_ID, RECORD, TERMS

YEAR_S = 365 * 24 * 3600.0
OF_ISSUER = replace(RECORD, peer_id=ISSUER.peer_id, credential=None, signature=b"").signed(ISSUER)  # who needs no invite


def live_after(learning: Callable[[PeerExchange], None], terms: RunTerms = TERMS) -> list[KnownPeer]:
    """Return who is live in Bob's book once he has heard all that."""

    async def main() -> list[KnownPeer]:
        peer_exchange = PeerExchange(terms, AddressBook(BOB.peer_id), SwarmTime(lambda: NOW_S), random.Random(0))
        learning(peer_exchange)
        return peer_exchange.book.live(asyncio.get_running_loop().time())

    return run(main(), start_s=1000.0)


def later(**changes: object) -> MemberRecord:
    """Return Alice's next record, unsigned."""
    return replace(RECORD, **{"sequence": RECORD.sequence + 1, "signature": b""} | changes)  # type: ignore[arg-type]


def test_a_valid_record_is_accepted_from_any_peer() -> None:
    for learning in (lambda peer_exchange: peer_exchange.take(RECORD), lambda peer_exchange: peer_exchange.take_all([RECORD.to_bytes()])):
        (entry,) = live_after(learning)
        assert (entry.peer_id, entry.global_step, entry.record) == (ALICE.peer_id, RECORD.global_step, RECORD)
        assert entry.addresses == RECORD.addresses


@pytest.mark.parametrize(
    "wrong",
    [
        later(signature=RECORD.signature),  # of another record
        later().signed(MALLORY),
        later(run_id=OTHER_RUN_ID).signed(ALICE),
        later(expires_s=NOW_S).signed(ALICE),
        later(expires_s=NOW_S + RECORD_LIFETIME_S + CLOCK_SKEW_S + 1).signed(ALICE),
        later(credential=None).signed(ALICE),  # the run is by invitation
    ],
)
def test_an_invalid_record_is_rejected_and_does_not_block_a_valid_one(wrong: MemberRecord) -> None:
    assert live_after(lambda peer_exchange: peer_exchange.take(wrong)) == []

    def both(peer_exchange: PeerExchange) -> None:
        peer_exchange.take(wrong)
        peer_exchange.take(RECORD)
        peer_exchange.take(wrong)

    (entry,) = live_after(both)
    assert entry.record == RECORD


def test_with_an_allowlist_only_members_are_accepted() -> None:
    by_list = replace(TERMS, access="allowlist", members=frozenset({ALICE.peer_id}))

    def learning(peer_exchange: PeerExchange) -> None:
        peer_exchange.take(RECORD)
        peer_exchange.take(OF_ISSUER)

    assert [entry.peer_id for entry in live_after(learning, by_list)] == [ALICE.peer_id]


@pytest.mark.parametrize("raw", [b"", b"\xff" * 60, b"x" * 5000, RECORD.to_bytes()[:-1], RECORD.to_bytes() * 9], ids=len)
def test_malformed_records_are_skipped(raw: bytes) -> None:
    assert live_after(lambda peer_exchange: peer_exchange.take_all([raw])) == []


def test_a_gap_in_the_checks_changes_nothing_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: MemberRecord, run_id: bytes, now_s: float) -> None:
        raise UnicodeEncodeError("ascii", "\u017f", 0, 1, "an unexpected error")

    monkeypatch.setattr(MemberRecord, "check", fail)
    assert live_after(lambda peer_exchange: peer_exchange.take(RECORD)) == []
    assert live_after(lambda peer_exchange: peer_exchange.take_all([RECORD.to_bytes()])) == []


def test_records_of_this_peer_are_ignored() -> None:
    about_bob = replace(RECORD, peer_id=BOB.peer_id, signature=b"").signed(BOB)
    assert live_after(lambda peer_exchange: peer_exchange.take(about_bob)) == []


def test_a_record_that_expires_at_once_is_a_farewell() -> None:
    farewell = later(expires_s=int(NOW_S + LAST_WORD_S) - 1).signed(ALICE)

    def leave(peer_exchange: PeerExchange) -> None:
        peer_exchange.take(RECORD)
        peer_exchange.take(OF_ISSUER)
        peer_exchange.take(farewell)
        peer_exchange.take(RECORD)  # an old record, which does not undo the farewell

    assert [entry.peer_id for entry in live_after(leave)] == [ISSUER.peer_id]

    def come_back(peer_exchange: PeerExchange) -> None:
        leave(peer_exchange)
        peer_exchange.take(later(sequence=RECORD.sequence + 2).signed(ALICE))

    assert {entry.peer_id for entry in live_after(come_back)} == {ALICE.peer_id, ISSUER.peer_id}


# --------------------------------------------------------------------------- what is passed on

PEERS = [Identity(bytes([number]) * 32) for number in range(20, 60)]


def passed_on(prepare: Callable[[PeerExchange], None], most: int) -> list[set[PeerId]]:
    """Return the peers whose records Alice gets, several times, from a peer of an open run that knows all PEERS."""

    async def main() -> list[set[PeerId]]:
        peer_exchange = open_exchange()
        for identity in PEERS:
            peer_exchange.take(record_of(identity))
        prepare(peer_exchange)
        lists = [peer_exchange.records_for(ALICE.peer_id, most) for _ in range(20)]
        assert all(len(records) <= most for records in lists)
        return [{MemberRecord.from_bytes(raw).peer_id for raw in records} for records in lists]

    return run(main(), start_s=1000.0)


async def test_a_stranger_sets_news_until_the_book_is_full_and_a_lost_peer_always_does() -> None:
    peer_exchange = open_exchange()
    swarm = [Identity(number.to_bytes(32, "big")) for number in range(1, MAX_ENTRIES + 2)]
    peer_exchange.book.learn(record_of(swarm[0], NOW_S - 1), loop_s())
    for identity in swarm[1:-1]:
        peer_exchange.news.clear()
        peer_exchange.take(record_of(identity))
        assert peer_exchange.news.is_set()
    peer_exchange.news.clear()
    peer_exchange.take(record_of(swarm[-1]))
    assert not peer_exchange.news.is_set() and peer_exchange.book.get(swarm[-1].peer_id).record is not None
    if peer_exchange.book.get(swarm[0].peer_id).record is None:
        peer_exchange.book.learn(record_of(swarm[0], NOW_S - 1), loop_s())
    peer_exchange.take(replace(record_of(swarm[0]), sequence=RECORD.sequence + 1, signature=b"").signed(swarm[0]))
    assert peer_exchange.news.is_set()


def size_of(swarm: list[Identity]) -> float:
    """Return Bob's estimate of the size of the swarm after many random samples of sixteen records."""

    async def main() -> float:
        peer_exchange, draws = open_exchange(), random.Random(1)
        records = [record_of(identity).to_bytes() for identity in swarm]
        for _ in range(120):
            peer_exchange.list_peers(draws.sample(records, 16), ALICE.peer_id)
        return len(peer_exchange.book.announced(loop_s())) / peer_exchange.familiar

    return run(main(), start_s=1000.0)


def test_the_size_of_a_swarm_larger_than_the_book_is_estimated() -> None:
    assert 38 <= size_of(PEERS) <= 42
    assert 700 <= size_of([Identity(number.to_bytes(32, "big")) for number in range(1, 1001)]) <= 1400


async def test_malformed_records_and_the_senders_own_do_not_change_the_estimate() -> None:
    peer_exchange = open_exchange()
    forged = [replace(record_of(identity), signature=bytes(64)).to_bytes() for identity in PEERS]
    peer_exchange.list_peers([b"noise", *forged, record_of(ALICE).to_bytes()], ALICE.peer_id)
    assert peer_exchange.familiar == 1.0
    assert [entry.peer_id for entry in peer_exchange.book.announced(loop_s())] == [ALICE.peer_id]


def open_exchange() -> PeerExchange:
    """Return Bob's peer exchange in an open run."""
    return exchange(replace(TERMS, access="open"))


def exchange(terms: RunTerms) -> PeerExchange:
    """Return Bob's peer exchange."""
    return PeerExchange(terms, AddressBook(BOB.peer_id), SwarmTime(lambda: NOW_S), random.Random(0))


def record_of(identity: Identity, expires_s: int = NOW_S + 300) -> MemberRecord:
    return replace(RECORD, peer_id=identity.peer_id, credential=None, expires_s=expires_s, signature=b"").signed(identity)


def test_our_own_record_is_always_sent_and_the_rest_is_a_random_sample() -> None:
    def own(peer_exchange: PeerExchange) -> None:
        peer_exchange.own = record_of(BOB)

    lists = passed_on(own, 3)
    assert all(BOB.peer_id in names and len(names) == 3 for names in lists)
    assert len(set.union(*lists)) > 20


def test_expired_and_unreachable_peers_and_the_partner_itself_are_not_sent() -> None:
    gone, failing, fine = PEERS[0], PEERS[1], {identity.peer_id for identity in PEERS[2:]}

    def prepare(peer_exchange: PeerExchange) -> None:
        peer_exchange.own = record_of(BOB, NOW_S)
        peer_exchange.book.learn(replace(record_of(gone, NOW_S + 4), sequence=RECORD.sequence + 1), loop_s())
        peer_exchange.book.note_failure(failing.peer_id, loop_s())
        peer_exchange.book.learn(record_of(ALICE), loop_s())

    assert set.union(*passed_on(prepare, 16)) == fine


async def test_an_introduction_keeps_to_the_requested_size() -> None:
    peer_exchange = open_exchange()
    for identity in PEERS:
        peer_exchange.take(record_of(identity))
    whole = PeerList.from_bytes(peer_exchange.peer_list(ALICE.peer_id, "", PEER_LIST_BYTES))
    assert len(whole.members) == MAX_LISTED and whole.unix_ms == 1000 * NOW_S
    assert 0 < len(peer_exchange.peer_list(ALICE.peer_id, "", 3000)) <= 3000
    peer_exchange.own = record_of(BOB)
    assert PeerList.from_bytes(peer_exchange.peer_list(ALICE.peer_id, "", 0)).members == ()
    assert PeerList.from_bytes(peer_exchange.peer_list(ALICE.peer_id, "", 1300)).members == (peer_exchange.own.to_bytes(),)


async def test_all_keys_of_one_invite_are_one_clock() -> None:
    """One guest with many keys sets nobody's time of day."""
    peer_exchange = exchange(TERMS)
    time, now_s = peer_exchange.time, peer_exchange.time.local_s()
    guests, unknown = PEERS[:8], PEERS[8:16]
    peer_exchange.take(OF_ISSUER)
    for guest in guests:
        credential = ISSUED.bound(BEARER, TERMS.run_id, guest.peer_id)
        peer_exchange.take(replace(RECORD, peer_id=guest.peer_id, credential=credential, signature=b"").signed(guest))
    time.add_reading("a", peer_exchange.group_of(ISSUER.peer_id), now_s)
    for guest in guests:
        time.add_reading("a", peer_exchange.group_of(guest.peer_id), now_s + YEAR_S)
    assert time.now_s() == now_s
    for stranger in unknown:
        time.add_reading("b", peer_exchange.group_of(stranger.peer_id), now_s + YEAR_S)
    assert time.now_s() == now_s
