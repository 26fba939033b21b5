"""The shelf refuses what poisoned a stock DHT, and forgets what is out of date."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from protocol import limits
from protocol.identity import Identity
from protocol.libp2p import record_store as shelf
from protocol.libp2p.record_store import RecordShelf, key_id, split_answer
from protocol.messages.records import MemberRecord, lookup_keys, own_shard_key
from protocol.wire import peer_pb2
from tests.protocol.peers import seeded
from tests.protocol.samples import ALICE, BOB, CREDENTIAL, NOW_S, OTHER_RUN_ID, RECORD, RUN_ID


class Clock:
    def __init__(self) -> None:
        self.now_s = float(NOW_S)

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def own(clock: Clock) -> RecordShelf:
    return RecordShelf(RUN_ID, now=clock)


def record(author: Identity, sequence: int = 1, lifetime_s: int = 100) -> MemberRecord:
    made = replace(RECORD, peer_id=author.peer_id, addresses=(), credential=None, sequence=sequence, expires_s=NOW_S + lifetime_s)
    return replace(made, signature=b"").signed(author)


def offer(own: RecordShelf, made: MemberRecord) -> bool:
    return own.offer(own.own_key(made.peer_id), made.to_bytes())


def test_a_good_record_is_held_and_found(own: RecordShelf) -> None:
    made = record(ALICE)
    assert offer(own, made)
    assert own.records() == [made]
    assert list(split_answer(own.answer(own.own_key(ALICE.peer_id), 10_000))) == [made.to_bytes()]
    assert own.own_key(ALICE.peer_id) in own.key_ids()


def test_keys_are_those_of_the_run_now(own: RecordShelf) -> None:
    assert own.key_ids() == tuple(key_id(key) for key in lookup_keys(RUN_ID, NOW_S))
    assert own.own_key(BOB.peer_id) == key_id(own_shard_key(RUN_ID, BOB.peer_id, NOW_S))


def bad_offers() -> Iterator[tuple[str, bytes]]:
    good = record(ALICE)
    yield "garbage", b"garbage"
    yield "nothing", b""
    yield "signed by another", replace(good, signature=record(BOB).signature).to_bytes()
    yield "changed after signing", replace(good, clock_steps=99).to_bytes()
    yield "another run", replace(good, run_id=OTHER_RUN_ID, signature=b"").signed(ALICE).to_bytes()
    yield "a year long", record(ALICE, lifetime_s=365 * 24 * 3600).to_bytes()
    yield "expired", record(ALICE, lifetime_s=-1).to_bytes()
    yield "4 MiB", bytes(4 << 20)

    wire = peer_pb2.MemberRecord.FromString(good.to_bytes())
    wire.addresses.append("/dns4/\u017f.x/tcp/1")
    yield "no ASCII", wire.SerializeToString()


BAD = list(bad_offers())


@pytest.mark.parametrize(("name", "data"), BAD, ids=[name for name, _ in BAD])
def test_bad_records_are_refused(own: RecordShelf, name: str, data: bytes) -> None:
    assert not own.offer(own.own_key(ALICE.peer_id), data)
    assert not own.notice(data)
    assert own.records() == []


def test_a_gap_in_the_checks_is_no_record(own: RecordShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: MemberRecord, run_id: bytes, now_s: float) -> None:
        raise ValueError("a case that nobody thought of")

    monkeypatch.setattr(MemberRecord, "check", fail)
    assert not own.offer(own.own_key(ALICE.peer_id), record(ALICE).to_bytes())
    assert not own.notice(record(ALICE).to_bytes())


def test_only_the_owners_key_takes_its_record(own: RecordShelf, clock: Clock) -> None:
    clock.now_s += limits.RECORD_LIFETIME_S + 100  # far from the border of a period
    data = record(ALICE, lifetime_s=500).to_bytes()
    for key in (*own.key_ids(), b"any other key", b""):
        assert own.offer(key, data) == (key == own.own_key(ALICE.peer_id))


def test_an_older_word_never_replaces_a_newer_one(own: RecordShelf) -> None:
    newer, older = record(ALICE, sequence=2, lifetime_s=50), record(ALICE, sequence=1, lifetime_s=200)
    assert offer(own, older)
    assert offer(own, newer), "a later word may also be a shorter one: a peer that leaves"
    assert not offer(own, older)
    assert offer(own, newer), "what is held is held"
    assert own.records() == [newer]


def test_two_words_of_one_number_leave_the_first(own: RecordShelf) -> None:
    first, second = record(ALICE, lifetime_s=50), record(ALICE, lifetime_s=60)
    assert offer(own, first)
    assert not offer(own, second)
    assert own.records() == [first]


def test_records_are_forgotten_when_they_expire(own: RecordShelf, clock: Clock) -> None:
    assert offer(own, record(ALICE, lifetime_s=50))
    key = own.own_key(ALICE.peer_id)
    clock.now_s += 50
    assert own.records() == []
    assert own.answer(key, 10_000) == b""


def test_a_full_key_takes_no_more_until_one_expires(own: RecordShelf, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "RECORDS_PER_KEY", 2)
    authors = [seeded(number) for number in range(200)]
    key = own.own_key(authors[0].peer_id)
    same_key = [author for author in authors if own.own_key(author.peer_id) == key]
    assert [offer(own, record(author, lifetime_s=20)) for author in same_key[:4]] == [True, True, False, False]
    clock.now_s += 20
    assert offer(own, record(same_key[3]))


def test_strangers_to_the_run_are_not_kept(clock: Clock) -> None:
    own = RecordShelf(RUN_ID, lambda made: made.credential == CREDENTIAL, clock)
    assert not offer(own, record(ALICE))


def test_a_record_of_the_last_period_is_still_taken_at_its_border(own: RecordShelf, clock: Clock) -> None:
    clock.now_s = NOW_S - NOW_S % limits.SHARD_PERIOD_S + limits.SHARD_PERIOD_S - 10
    made = replace(RECORD, peer_id=BOB.peer_id, addresses=(), credential=None, expires_s=int(clock.now_s) + 100, signature=b"").signed(BOB)
    old_key = own.own_key(BOB.peer_id)
    clock.now_s += 20
    assert own.own_key(BOB.peer_id) != old_key
    assert own.offer(old_key, made.to_bytes())
    assert old_key in own.key_ids()


def test_an_answer_that_would_be_too_long_is_a_sample(own: RecordShelf) -> None:
    authors = [seeded(number) for number in range(100)]
    key = own.own_key(authors[0].peer_id)
    made = [record(author) for author in authors if own.own_key(author.peer_id) == key]
    assert all(offer(own, one) for one in made)
    size = len(made[0].to_bytes()) + 2
    answers = [list(split_answer(own.answer(key, 3 * size + 1))) for _ in range(30)]
    assert all(len(answer) == 3 for answer in answers)
    assert len({data for answer in answers for data in answer}) > 3


def test_a_cut_answer_yields_its_whole_records() -> None:
    assert list(split_answer(b"\x02\x00ab\x03\x00cd")) == [b"ab"]
    assert list(split_answer(b"\x02")) == []
