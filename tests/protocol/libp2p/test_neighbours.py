"""Routing table and stored records: bounded, and not filled by many identities of one network."""

from __future__ import annotations

import random

import pytest

from gossamer.protocol.libp2p import neighbours as module
from gossamer.protocol.libp2p.neighbours import BUCKET, Held, Holdings, Neighbours, place_of
from tests.clock import Clock
from tests.protocol.libp2p.test_record_store import record
from tests.protocol.peers import seeded
from tests.protocol.samples import ALICE, NOW_S

ME = seeded(1).peer_id


def held(number: int, sequence: int = 1, lifetime_s: int = 100) -> Held:
    made = record(seeded(number), sequence, lifetime_s)
    return Held(made, made.to_bytes())


def farthest(num: int) -> list[Held]:
    """Return members of the bucket with the largest distance from us."""
    found = (held(number) for number in range(2, 10_000))
    bit = 1 << 159
    return [next(one for one in found if (place_of(one.peer) ^ place_of(ME)) & bit) for _ in range(num)]


def test_the_routing_table_is_denser_near_its_own_place() -> None:
    known = Neighbours(ME, Clock(), random.Random(1))
    for number in range(2, 300):
        known.note_contact(held(number), str(number))
    assert BUCKET * 4 < len(known) < BUCKET * 9
    nearest = sorted((held(number) for number in range(2, 300)), key=lambda one: place_of(one.peer) ^ place_of(ME))[:BUCKET]
    assert {one.peer for one in nearest} <= {one.peer for one in known.all()}


def test_a_newcomer_replaces_only_a_silent_neighbour() -> None:
    clock = Clock()
    known = Neighbours(ME, clock, random.Random(1))
    *first, second, third = farthest(BUCKET + 2)
    for number, one in enumerate(first):
        known.note_contact(one, str(number))
    known.note_contact(second, "another")
    assert second not in known.all()
    clock.now_s = module.SILENT_S
    for one in first[1:]:
        known.note_contact(one, "")
    known.note_contact(third, "another")
    assert third in known.all() and first[0] not in known.all()


def test_many_peers_of_one_network_make_room_for_others() -> None:
    known = Neighbours(ME, Clock(), random.Random(1))
    *others_, other = farthest(3 * BUCKET)
    for one in others_:
        known.note_contact(one, "6.6.0.0/16")
    known.note_contact(other, "7.7.0.0/16")
    assert other in known.all() and len(known) == BUCKET


def test_sometimes_a_newcomer_replaces_any_neighbour() -> None:
    known = Neighbours(ME, Clock(), random.Random(1))
    members = farthest(BUCKET + 100)
    for number, one in enumerate(members):
        known.note_contact(one, str(number))
    stayed = len(set(members[:BUCKET]) & set(known.all()))
    assert stayed <= BUCKET // 2 and len(known) == BUCKET


def test_an_older_record_does_not_replace_a_newer_one() -> None:
    known = Neighbours(ME, Clock(), random.Random(1))
    for sequence in (2, 1):
        known.note_contact(held(5, sequence), "")
    assert known.all() == [held(5, 2)]
    known.lost(held(5).peer)
    assert known.all() == []


def test_quietest_returns_the_neighbour_that_was_silent_the_longest() -> None:
    clock = Clock()
    known = Neighbours(ME, clock, random.Random(1))
    for second, number in enumerate((5, 6)):
        clock.now_s = second
        known.note_contact(held(number), "")
    assert known.quietest(2.0) is None
    clock.now_s = 3.0
    assert known.quietest(2.0) == held(5)


def test_holdings_keep_the_latest_record() -> None:
    holdings = Holdings(ME)
    assert holdings.put(held(5, 2), "", NOW_S)
    assert not holdings.put(held(5, 1), "", NOW_S)
    assert holdings.put(held(5, 2), "", NOW_S), "the same record is stored again"
    assert not holdings.put(held(5, 2, lifetime_s=50), "", NOW_S), "of two records with one sequence number, the first stays"
    assert holdings.put(held(5, 3, lifetime_s=1), "", NOW_S), "a later record may expire earlier, when its peer leaves"
    assert holdings.all() == [held(5, 3, 1)]


def test_a_flood_from_one_network_evicts_no_record_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD", 20)
    holdings = Holdings(ME)
    honest = [held(number) for number in range(2, 12)]
    for number, one in enumerate(honest):
        assert holdings.put(one, f"8.{number}.0.0/16", NOW_S)
    for number in range(100, 300):
        holdings.put(held(number), "6.6.0.0/16", NOW_S)
    assert set(honest) <= set(holdings.all()) and len(holdings.all()) == 20


def test_near_key_ids_push_out_only_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD", 10)
    holdings = Holdings(ME)
    honest = [held(number) for number in range(2, 10)]
    for number, one in enumerate(honest):
        holdings.put(one, f"8.{number}.0.0/16", NOW_S)
    near = sorted((held(number) for number in range(100, 400)), key=lambda one: place_of(one.peer) ^ place_of(ME))
    for one in reversed(near):
        holdings.put(one, "6.6.0.0/16", NOW_S)
    assert set(honest) <= set(holdings.all())
    assert near[0] in holdings.all(), "of many the nearest stay"


def test_expired_records_make_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD", 1)
    holdings = Holdings(ME)
    holdings.put(held(5, lifetime_s=10), "", NOW_S)
    made = record(ALICE)
    assert holdings.put(Held(made, made.to_bytes()), "", NOW_S + 20)
