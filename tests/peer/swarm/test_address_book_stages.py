"""The address book in a staged run: weights are shared with holders of the own stage, hops with those of its neighbours."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from gossamer.peer.swarm.address_book import MAX_ENTRIES, AddressBook
from gossamer.peer.swarm.known_peer import HOP_S, PARTNER_HOPS
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.records import MemberRecord
from tests.protocol.samples import ALICE, NOW_S, RUN_ID, TERMS

PEERS = [Identity(bytes([number]) * 32) for number in range(20, 26)]


def record(peer: Identity, stage: int) -> MemberRecord:
    bare = MemberRecord(RUN_ID, peer.peer_id, ("/ip4/203.0.113.5/tcp/4001",), 5, False, 1, NOW_S + 300)
    return replace(bare, stage=stage).signed(peer)


def book_of(stages: list[int], own: int) -> AddressBook:
    book = AddressBook(ALICE.peer_id)
    for peer, stage in zip(PEERS, stages, strict=False):
        book.learn(record(peer, stage), 10.0)
    book.stage = own
    return book


def test_partners_are_holders_of_the_own_stage_and_those_of_whom_no_stage_is_known() -> None:
    book = book_of([1, 2, 2, 3, 0], own=2)
    assert {entry.stage for entry in book.live(11.0)} == {0, 2}
    assert {entry.stage for entry in book.everybody(11.0)} == {0, 1, 2, 3}
    chosen = [book.choose(11.0, random.Random(seed)) for seed in range(20)]
    assert {entry.stage for entry in chosen if entry} == {0, 2}
    assert len(book.announced(11.0)) == 5, "records of all stages are passed on"


def test_without_stages_everybody_is_a_partner() -> None:
    book = book_of([0, 0, 0], own=0)
    assert book.live(11.0) == book.everybody(11.0)


def test_holders_of_a_stage_are_found_and_missed() -> None:
    book = book_of([1, 2, 2], own=1)
    assert [entry.peer_id for entry in book.holders(2, 11.0)] == [PEERS[1].peer_id, PEERS[2].peer_id]
    assert book.last_seen_s(2) == 10.0 and book.last_seen_s(3) is None
    assert book.holders(2, 2000.0) == [] and book.last_seen_s(2) == 10.0, "it is remembered when they were there"


def test_a_holder_that_moves_is_a_holder_of_its_new_stage_alone() -> None:
    book = book_of([2], own=1)
    moved = replace(record(PEERS[0], 3), sequence=2, signature=b"").signed(PEERS[0])
    book.learn(moved, 12.0)
    assert not book.holders(2, 13.0) and book.holders(3, 13.0)


def test_a_partner_of_a_lane_outlasts_strangers_and_restarts(tmp_path: Path) -> None:
    book = book_of([2, 2], own=1)
    partner, stranger = PEERS[0].peer_id, PEERS[1].peer_id
    for number in range(PARTNER_HOPS):
        assert not book.get(partner).is_partner, "a few hops are soon made"
        for _ in range(PARTNER_HOPS):
            book.note_carried(partner, 10.0 + HOP_S * number)
    assert book.get(partner).is_partner and not book.get(partner).has_met and not book.get(stranger).is_partner
    assert [entry.peer_id for entry in book.carriers(2)] == [partner]
    for number in range(MAX_ENTRIES):
        book.add_address(Identity((1000 + number).to_bytes(4, "little") * 8).peer_id, f"/ip4/203.0.113.{number % 250}/tcp/1", 11.0)
    assert book.get(partner).is_partner and not book.get(stranger).addresses, "the stranger made room"
    (tmp_path / "peers").write_bytes(book.to_bytes(12.0))
    again = AddressBook(ALICE.peer_id)
    again.load(tmp_path / "peers", 0.0)
    assert again.get(partner).is_partner and not again.get(partner).has_met
    (tmp_path / "peers").write_text((tmp_path / "peers").read_text().replace(f'"carried": {PARTNER_HOPS}', '"carried": true'))
    earlier = AddressBook(ALICE.peer_id)
    earlier.load(tmp_path / "peers", 0.0)  # of a release that counted none
    assert earlier.get(partner).has_carried and not earlier.get(partner).is_partner


def test_the_typical_step_of_other_stages_is_that_of_those_that_carried_hops_with_us() -> None:
    book = AddressBook(ALICE.peer_id)
    book.stage = 2
    for peer, stage, step in zip(PEERS, (1, 1, 3, 2, 0), (500, 700, 900, 20, 30), strict=False):
        book.learn(replace(record(peer, stage), global_step=step, signature=b"").signed(peer), 10.0)
    groups = SybilGroups(book, TERMS)
    assert groups.typical_of_other_stages(11.0, 10_000) == 700
    assert groups.typical_of_other_stages(11.0, 800) == 500, "a step beyond the end of the run counts for nothing"
    book.note_carried(PEERS[0].peer_id, 10.0)
    assert book.get(PEERS[0].peer_id).has_worked and not book.get(PEERS[0].peer_id).is_partner
    assert groups.typical_of_other_stages(11.0, 10_000) == 500
    assert groups.typical_of_other_stages(2000.0, 10_000) == 0


def test_a_refusal_and_new_weights_of_ours_end_no_rest() -> None:
    book = book_of([2], own=1)
    (entry,) = book.holders(2, 11.0)
    book.note_refusal(entry.peer_id, 11.0)
    book.rest(entry.peer_id, 12.0, 600.0)
    book.note_refusal(entry.peer_id, 13.0)
    assert entry.callable_s == 612.0
    book.forget_refusals()
    assert entry.callable_s == entry.welcome_s == 612.0
