"""The record store rejects invalid records, forgets expired ones, and stays bounded and diverse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from gossamer.protocol.identity import Identity
from gossamer.protocol.libp2p import record_store
from gossamer.protocol.libp2p.neighbours import Held
from gossamer.protocol.libp2p.record_store import RecordStore, join_records, split_reply
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.wire import peer_pb2
from tests.clock import Clock
from tests.protocol.peers import seeded
from tests.protocol.samples import ALICE, BOB, CREDENTIAL, NOW_S, OTHER_RUN_ID, RECORD, RUN_ID


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW_S)


@pytest.fixture
def own(clock: Clock) -> RecordStore:
    return RecordStore(RUN_ID, now=clock)


def record(author: Identity, sequence: int = 1, lifetime_s: int = 100, addresses: tuple[str, ...] = ()) -> MemberRecord:
    made = replace(RECORD, peer_id=author.peer_id, addresses=addresses, credential=None, sequence=sequence, expires_s=NOW_S + lifetime_s)
    return replace(made, signature=b"").signed(author)


def test_a_valid_record_is_kept_unchanged(own: RecordStore) -> None:
    made = record(ALICE)
    assert own.keep_latest(made.to_bytes()) == Held(made, made.to_bytes())
    assert own.records() == [made]


def bad_offers() -> Iterator[tuple[str, bytes]]:
    good = record(ALICE)
    yield "garbage", b"garbage"
    yield "nothing", b""
    yield "signed by another", replace(good, signature=record(BOB).signature).to_bytes()
    yield "changed after signing", replace(good, global_step=99).to_bytes()
    yield "another run", replace(good, run_id=OTHER_RUN_ID, signature=b"").signed(ALICE).to_bytes()
    yield "a year long", record(ALICE, lifetime_s=365 * 24 * 3600).to_bytes()
    yield "expired", record(ALICE, lifetime_s=-1).to_bytes()
    yield "4 MiB", bytes(4 << 20)

    wire = peer_pb2.MemberRecord.FromString(good.to_bytes())
    wire.addresses.append("/dns4/\u017f.x/tcp/1")
    yield "no ASCII", wire.SerializeToString()


BAD = list(bad_offers())


@pytest.mark.parametrize(("name", "data"), BAD, ids=[name for name, _ in BAD])
def test_invalid_records_are_rejected(own: RecordStore, name: str, data: bytes) -> None:
    assert own.keep_latest(data) is None
    assert own.records() == []


def test_an_unexpected_error_rejects_the_record(own: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: MemberRecord, run_id: bytes, now_s: float) -> None:
        raise ValueError("a case that nobody thought of")

    monkeypatch.setattr(MemberRecord, "check", fail)
    assert own.keep_latest(record(ALICE).to_bytes()) is None


def test_an_older_record_never_replaces_a_newer_one(own: RecordStore) -> None:
    newer, older = record(ALICE, sequence=2, lifetime_s=50), record(ALICE, sequence=1, lifetime_s=200)
    for made in (older, newer, older):
        assert own.keep_latest(made.to_bytes()) is not None, "an older record is valid too"
    assert own.records() == [newer]


def test_records_are_forgotten_when_they_expire(own: RecordStore, clock: Clock) -> None:
    held = own.keep_latest(record(ALICE, lifetime_s=50).to_bytes())
    assert held is not None and own.is_in_force(held)
    clock.now_s += 50
    assert own.records() == []
    assert not own.is_in_force(held)
    assert own.keep_latest(held.data) is None


def test_records_of_nonmembers_are_not_kept(clock: Clock) -> None:
    own = RecordStore(RUN_ID, lambda made: made.credential == CREDENTIAL, clock)
    assert own.keep_latest(record(ALICE).to_bytes()) is None


def test_many_records_of_one_network_leave_room_for_others(own: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_store, "RECORDS_IN_VIEW", 20)
    others = [record(seeded(number), addresses=(f"/ip4/8.{number}.0.1/tcp/1",)) for number in range(10)]
    others_ = [record(seeded(number), addresses=("/ip4/6.6.0.1/tcp/1",)) for number in range(100, 150)]
    for made in (*others, *others_):
        own.keep_latest(made.to_bytes())
    kept = own.records()
    assert set(others) <= set(kept) and len(kept) == 20
    assert kept[-10:] != others_[:10] and kept[-10:] != others_[-10:], "any of the records of one network may stay"


def test_expired_records_make_room_first(own: RecordStore, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_store, "RECORDS_IN_VIEW", 2)
    for author, lifetime_s in ((ALICE, 10), (BOB, 10)):
        own.keep_latest(record(author, lifetime_s=lifetime_s).to_bytes())
    clock.now_s += 20
    made = record(seeded(7))
    own.keep_latest(made.to_bytes())
    assert own.records() == [made]


def test_a_truncated_reply_yields_its_complete_records() -> None:
    held = [Held(made, made.to_bytes()) for made in (record(ALICE), record(BOB))]
    assert list(split_reply(join_records(held))) == [one.data for one in held]
    assert list(split_reply(b"\x02\x00ab\x03\x00cd")) == [b"ab"]
    assert list(split_reply(b"\x02")) == []
