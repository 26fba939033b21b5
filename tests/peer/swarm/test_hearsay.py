"""Records between peers: believed is only what a peer has signed, for this run, in force, if it may take part; passed on what is of use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from gossamer.peer.swarm.address_book import MAX_ENTRIES, AddressBook, KnownPeer, loop_s
from gossamer.peer.swarm.hearsay import LAST_WORD_S, Hearsay
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.limits import CLOCK_SKEW_S, INTRODUCED, RECORD_LIFETIME_S
from gossamer.protocol.memory.virtual_time import run
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.replies import INTRODUCTION_BYTES, Introduction
from gossamer.protocol.messages.terms import RunTerms
from tests.protocol.samples import ALICE, BOB, ISSUER, MALLORY, NOW_S, OTHER_RUN_ID, RECORD, TERMS

OF_ISSUER = replace(RECORD, peer_id=ISSUER.peer_id, credential=None, signature=b"").signed(ISSUER)  # who needs no invite


def live_after(tell: Callable[[Hearsay], None], terms: RunTerms = TERMS) -> list[KnownPeer]:
    """Return who is live in Bob's book once he has heard all that."""

    async def main() -> list[KnownPeer]:
        hearsay = Hearsay(terms, AddressBook(BOB.peer_id), SwarmTime(lambda: NOW_S), random.Random(0))
        tell(hearsay)
        return hearsay.book.live(asyncio.get_running_loop().time())

    return run(main(), start_s=1000.0)


def later(**changes: object) -> MemberRecord:
    """Return Alice's next word, unsigned."""
    return replace(RECORD, **{"sequence": RECORD.sequence + 1, "signature": b""} | changes)  # type: ignore[arg-type]


def test_a_true_record_is_believed_from_whoever_brings_it() -> None:
    for tell in (lambda hearsay: hearsay.take(RECORD), lambda hearsay: hearsay.take_all([RECORD.to_bytes()])):
        (entry,) = live_after(tell)
        assert (entry.peer_id, entry.clock_steps, entry.record) == (ALICE.peer_id, RECORD.clock_steps, RECORD)
        assert entry.addresses == RECORD.addresses


@pytest.mark.parametrize(
    "wrong",
    [
        later(signature=RECORD.signature),  # not what was signed
        later().signed(MALLORY),
        later(run_id=OTHER_RUN_ID).signed(ALICE),
        later(expires_s=NOW_S).signed(ALICE),
        later(expires_s=NOW_S + RECORD_LIFETIME_S + CLOCK_SKEW_S + 1).signed(ALICE),
        later(credential=None).signed(ALICE),  # the run is by invitation
    ],
)
def test_nothing_else_is_and_it_does_not_hide_the_truth(wrong: MemberRecord) -> None:
    assert live_after(lambda hearsay: hearsay.take(wrong)) == []

    def both(hearsay: Hearsay) -> None:
        hearsay.take(wrong)
        hearsay.take(RECORD)
        hearsay.take(wrong)

    (entry,) = live_after(both)
    assert entry.record == RECORD


def test_only_members_are_believed_where_there_is_a_list() -> None:
    by_list = replace(TERMS, access="allowlist", members=frozenset({ALICE.peer_id}))

    def tell(hearsay: Hearsay) -> None:
        hearsay.take(RECORD)
        hearsay.take(OF_ISSUER)

    assert [entry.peer_id for entry in live_after(tell, by_list)] == [ALICE.peer_id]


@pytest.mark.parametrize("raw", [b"", b"\xff" * 60, b"x" * 5000, RECORD.to_bytes()[:-1], RECORD.to_bytes() * 9], ids=len)
def test_noise_is_passed_over(raw: bytes) -> None:
    assert live_after(lambda hearsay: hearsay.take_all([raw])) == []


def test_a_gap_in_the_checks_changes_nothing_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: MemberRecord, run_id: bytes, now_s: float) -> None:
        raise UnicodeEncodeError("ascii", "\u017f", 0, 1, "a case that nobody thought of")

    monkeypatch.setattr(MemberRecord, "check", fail)
    assert live_after(lambda hearsay: hearsay.take(RECORD)) == []
    assert live_after(lambda hearsay: hearsay.take_all([RECORD.to_bytes()])) == []


def test_we_are_not_told_about_ourselves() -> None:
    about_bob = replace(RECORD, peer_id=BOB.peer_id, signature=b"").signed(BOB)
    assert live_after(lambda hearsay: hearsay.take(about_bob)) == []


def test_a_record_that_ends_at_once_is_a_farewell() -> None:
    farewell = later(expires_s=int(NOW_S + LAST_WORD_S) - 1).signed(ALICE)

    def leave(hearsay: Hearsay) -> None:
        hearsay.take(RECORD)
        hearsay.take(OF_ISSUER)
        hearsay.take(farewell)
        hearsay.take(RECORD)  # an old word, which does not bring it back

    assert [entry.peer_id for entry in live_after(leave)] == [ISSUER.peer_id]

    def come_back(hearsay: Hearsay) -> None:
        leave(hearsay)
        hearsay.take(later(sequence=RECORD.sequence + 2).signed(ALICE))

    assert {entry.peer_id for entry in live_after(come_back)} == {ALICE.peer_id, ISSUER.peer_id}


# --------------------------------------------------------------------------- what is passed on

PEERS = [Identity(bytes([number]) * 32) for number in range(20, 60)]


def passed_on(prepare: Callable[[Hearsay], None], most: int, times: int = 20) -> list[set[PeerId]]:
    """Return of whom the bearer of invites is told, several times, by a peer of an open run that has heard of all PEERS."""

    async def main() -> list[set[PeerId]]:
        hearsay = Hearsay(replace(TERMS, access="open"), AddressBook(BOB.peer_id), SwarmTime(lambda: NOW_S), random.Random(0))
        for identity in PEERS:
            hearsay.take(record_of(identity))
        prepare(hearsay)
        told = [hearsay.records_for(ALICE.peer_id, most) for _ in range(times)]
        assert all(len(records) <= most for records in told)
        return [{MemberRecord.from_bytes(raw).peer_id for raw in records} for records in told]

    return run(main(), start_s=1000.0)


def test_a_stranger_is_news_until_the_book_is_full_and_who_was_lost_always_is() -> None:
    async def main() -> None:
        hearsay = Hearsay(replace(TERMS, access="open"), AddressBook(BOB.peer_id), SwarmTime(lambda: NOW_S), random.Random(0))
        swarm = [Identity(number.to_bytes(32, "big")) for number in range(1, MAX_ENTRIES + 2)]
        hearsay.book.learn(record_of(swarm[0], NOW_S - 1), loop_s())
        for identity in swarm[1:-1]:
            hearsay.news.clear()
            hearsay.take(record_of(identity))
            assert hearsay.news.is_set()
        hearsay.news.clear()
        hearsay.take(record_of(swarm[-1]))
        assert not hearsay.news.is_set() and hearsay.book.record_of(swarm[-1].peer_id) is not None
        if hearsay.book.record_of(swarm[0].peer_id) is None:
            hearsay.book.learn(record_of(swarm[0], NOW_S - 1), loop_s())
        hearsay.take(replace(record_of(swarm[0]), sequence=RECORD.sequence + 1, signature=b"").signed(swarm[0]))
        assert hearsay.news.is_set()

    run(main(), start_s=1000.0)


def size_of(swarm: list[Identity], times: int = 120) -> float:
    """Return how large a swarm looks to Bob, whom others tell of sixteen at random again and again."""

    async def main() -> float:
        hearsay, draws = (
            Hearsay(replace(TERMS, access="open"), AddressBook(BOB.peer_id), SwarmTime(lambda: NOW_S), random.Random(0)),
            random.Random(1),
        )
        records = [record_of(identity).to_bytes() for identity in swarm]
        for _ in range(times):
            hearsay.introduce(draws.sample(records, 16), ALICE.peer_id)
        return len(hearsay.book.announced(loop_s())) / hearsay.familiar

    return run(main(), start_s=1000.0)


def test_a_swarm_larger_than_the_book_is_known_to_be_larger() -> None:
    assert 38 <= size_of(PEERS) <= 42
    assert 700 <= size_of([Identity(number.to_bytes(32, "big")) for number in range(1, 1001)]) <= 1400


def test_neither_noise_nor_who_names_itself_changes_how_large_the_swarm_looks() -> None:
    async def main() -> None:
        hearsay = Hearsay(replace(TERMS, access="open"), AddressBook(BOB.peer_id), SwarmTime(lambda: NOW_S), random.Random(0))
        forged = [replace(record_of(identity), signature=bytes(64)).to_bytes() for identity in PEERS]
        hearsay.introduce([b"noise", *forged, record_of(ALICE).to_bytes()], ALICE.peer_id)
        assert hearsay.familiar == 1.0
        assert [entry.peer_id for entry in hearsay.book.announced(loop_s())] == [ALICE.peer_id]

    run(main(), start_s=1000.0)


def record_of(identity: Identity, expires_s: int = NOW_S + 300) -> MemberRecord:
    return replace(RECORD, peer_id=identity.peer_id, credential=None, expires_s=expires_s, signature=b"").signed(identity)


def test_our_own_word_is_always_among_them_and_the_rest_is_a_random_choice() -> None:
    def own(hearsay: Hearsay) -> None:
        hearsay.own = record_of(BOB)

    told = passed_on(own, 3)
    assert all(BOB.peer_id in names and len(names) == 3 for names in told)
    assert len(set.union(*told)) > 20


def test_no_record_goes_on_that_is_out_of_date_nor_one_of_whom_we_cannot_reach_nor_the_partners_own() -> None:
    gone, failing, fine = PEERS[0], PEERS[1], {identity.peer_id for identity in PEERS[2:]}

    def prepare(hearsay: Hearsay) -> None:
        hearsay.own = record_of(BOB, NOW_S)
        hearsay.book.learn(replace(record_of(gone, NOW_S + 4), sequence=RECORD.sequence + 1), loop_s())
        hearsay.book.failed(failing.peer_id, loop_s())
        hearsay.book.learn(record_of(ALICE), loop_s())

    assert set.union(*passed_on(prepare, 16)) == fine


def test_an_introduction_is_as_small_as_it_was_asked_to_be() -> None:
    async def main() -> None:
        hearsay = Hearsay(replace(TERMS, access="open"), AddressBook(BOB.peer_id), SwarmTime(lambda: NOW_S), random.Random(0))
        for identity in PEERS:
            hearsay.take(record_of(identity))
        whole = Introduction.from_bytes(hearsay.introduction(ALICE.peer_id, INTRODUCTION_BYTES))
        assert len(whole.members) == INTRODUCED and whole.unix_ms == 1000 * NOW_S
        assert 0 < len(hearsay.introduction(ALICE.peer_id, 3000)) <= 3000
        hearsay.own = record_of(BOB)
        assert Introduction.from_bytes(hearsay.introduction(ALICE.peer_id, 0)).members == ()
        assert Introduction.from_bytes(hearsay.introduction(ALICE.peer_id, 1100)).members == (hearsay.own.to_bytes(),)

    run(main(), start_s=1000.0)
