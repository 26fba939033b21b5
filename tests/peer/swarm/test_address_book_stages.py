"""The address book in a staged run: weights are shared with holders of the own stage, hops with those of its neighbours."""

from __future__ import annotations

import random
from dataclasses import replace

from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.records import MemberRecord
from tests.protocol.samples import ALICE, NOW_S, RUN_ID

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
