"""The members that a node reports: by the newest records that it has checked, its own among them."""

from __future__ import annotations

import random
from dataclasses import replace

from gossamer.peer.machine.events import Event, MemberSeen, MembersSeen
from gossamer.peer.swarm.address_book import BAN_S, AddressBook
from gossamer.peer.swarm.member_report import MemberReporter
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.identity import Identity
from gossamer.protocol.memory.virtual_time import run
from gossamer.protocol.messages.figures import MemberFigures
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.tasks import loop_s
from tests.peer.two_sides import SEEDS, TERMS

A, B = (Identity(seed) for seed in SEEDS)
MALLORY = Identity(bytes([7]) * 32)
NOW_S = 1000
FIGURES = MemberFigures(own_steps=9, loss_milli=2501, joined_s=400, carried_mb=3)
OPEN = replace(TERMS, access="open")


def record(of: Identity, sequence: int = 1, lifetime_s: int = 300, *, paused: bool = False, finished: bool = False) -> MemberRecord:
    expires_s = NOW_S + lifetime_s
    return MemberRecord(OPEN.run_id, of.peer_id, (), 5, finished, sequence, expires_s, None, paused, 70, figures=FIGURES).signed(of)


def reported(*batches: list[MemberRecord], banned: bool = False, late: list[MemberRecord] | None = None) -> list[MembersSeen]:
    """Return what is emitted after each batch of records that arrive; those of A are its own. B may be banned before a `late` batch."""
    events: list[Event] = []

    async def story() -> None:
        exchange = PeerExchange(OPEN, AddressBook(A.peer_id), SwarmTime(lambda: float(NOW_S)), random.Random(0))
        reporter = MemberReporter(events.append, exchange)
        for batch in (*batches, late or []):
            if banned and batch is late:
                exchange.book.ban(B.peer_id, loop_s(), "a test")
            for one in batch:
                if one.peer_id == A.peer_id:
                    exchange.own = one
                else:
                    exchange.take(one)
            reporter.report()

    run(story())
    return [event for event in events if isinstance(event, MembersSeen)]


def test_own_and_others_records_are_reported_with_their_figures_and_once_each() -> None:
    first, second = reported([record(A), record(B)], [record(B)], [record(B, 2, paused=True)])
    assert first.members[0] == MemberSeen(str(A.peer_id), "training", 1, NOW_S + 300, 5, 70, 9, 2.5, 400, 3, is_own=True)
    assert replace(first.members[1], is_own=True, peer_id=str(A.peer_id), group="") == first.members[0]
    assert [(member.peer_id, member.state) for member in second.members] == [(str(B.peer_id), "paused")]


def test_a_peer_whose_trainer_starts_shows_no_figures_and_is_not_paused() -> None:
    (seen,) = reported([replace(record(B, paused=True), figures=None).signed(B)])
    assert [member.state for member in seen.members] == ["starting"]


def test_members_that_nobody_has_met_are_one_group_in_an_open_run_and_this_peer_is_in_none() -> None:
    (seen,) = reported([record(A), record(B), record(MALLORY)])
    own, *others = seen.members
    assert own.group == ""
    assert others[0].group == others[1].group != ""


def test_a_banned_peer_is_not_reported() -> None:
    assert len(reported([record(A)], banned=True, late=[record(B)])) == 1


def test_a_peer_whose_ban_is_over_is_reported_again() -> None:
    events: list[Event] = []

    async def story() -> None:
        exchange = PeerExchange(OPEN, AddressBook(A.peer_id), SwarmTime(lambda: float(NOW_S)), random.Random(0))
        exchange.book.ban(B.peer_id, loop_s() - BAN_S - 1.0, "a test")
        exchange.take(record(B))
        MemberReporter(events.append, exchange).report()

    run(story())
    assert len(events) == 1


def test_a_farewell_is_reported_as_a_record_that_is_over() -> None:
    *_, last = reported([record(A), record(B)], [record(B, 2, lifetime_s=1)])
    assert last.members[0].expires <= NOW_S + 1


def test_records_without_figures_are_reported_and_forged_ones_are_not() -> None:
    bare = replace(record(B), figures=None).signed(B)
    forged = replace(record(MALLORY), figures=replace(FIGURES, own_steps=10))
    (seen,) = reported([record(A), bare, forged])
    assert [member.peer_id for member in seen.members] == [str(A.peer_id), str(B.peer_id)]
    assert (seen.members[1].own_steps, seen.members[1].loss, seen.members[1].tokens) == (None, None, 70)


def test_nothing_is_reported_before_there_is_a_record() -> None:
    assert reported([]) == []
