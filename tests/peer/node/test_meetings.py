"""The meetings of a node beside each other: one per fragment, so many at once, and two that call each other still meet."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from gossamer.peer.meeting.commands import Finish
from gossamer.peer.meeting.interface import MeetingOutcome
from gossamer.peer.meeting.line import Direction
from gossamer.peer.meeting.machine import AGAIN_S, CONNECT_S
from gossamer.peer.node.meetings import LINE_UP_S, MAX_OUTBOUND
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import LEAST_BYTES_PER_S
from gossamer.protocol.memory import network
from gossamer.protocol.memory.conversation import Link as Wire
from gossamer.protocol.messages.messages import RunPhase
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm

QUIET = tiny_manifest(run={"total_steps": 100_000})


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    return Swarm(tmp_path, manifest=QUIET)


async def acquainted(swarm: Swarm, num_peers: int) -> list[Peer]:
    """Peers whose trainers make no steps, each with all the others in its book."""
    peers = [swarm.add() for _ in range(num_peers)]
    for peer in peers:
        peer.trainer.frozen = True
        peer.start()
    await asyncio.sleep(1.0)
    for peer in peers:
        for other in peers:
            peer.book.add_address(other.peer_id, "/ip4/192.0.2.1/tcp/4001", asyncio.get_running_loop().time())
    return peers


def everybody_but(peers: list[Peer], *wanted: Peer) -> set[PeerId]:
    return {peer.peer_id for peer in peers if peer not in wanted}


async def test_two_that_call_each_other_at_once_meet_once(swarm: Swarm) -> None:
    a, b = await acquainted(swarm, 2)
    await asyncio.gather(a.node.meetings.try_next(0, set()), b.node.meetings.try_next(0, set()))
    await asyncio.sleep(1.0)
    assert a.node.meetings.completed[0] == b.node.meetings.completed[0] == 1
    assert a.trainer.applied.total() == b.trainer.applied.total() == 1


async def call(caller: Peer, called: Peer, fragment: int = 0) -> Finish:
    finish = await caller.node.meetings.try_next(fragment, everybody_but(caller.swarm.peers, called))
    assert finish is not None
    return finish


async def test_one_caller_waits_for_the_end_of_a_meeting_and_others_find_it_busy_on_this_fragment(tmp_path: Path) -> None:
    async with Swarm(tmp_path, manifest=QUIET, wire=Wire(latency_s=0.1)) as swarm:
        peers = called, first, second, third = await acquainted(swarm, 4)
        one = asyncio.create_task(call(first, called))
        await swarm.until(lambda: called.node.meetings.active)
        two = asyncio.create_task(call(second, called))
        await asyncio.sleep(0.2)
        assert (await call(third, called)).refusal is RefusalCode.BUSY
        other = asyncio.create_task(call(third, first, 1))
        assert not one.done(), "the first meeting was over before the others called"
        assert [(await finish).outcome for finish in (one, two, other)] == [MeetingOutcome.COMPLETED] * 3
        assert called.outcomes() == Counter(completed=2)
        assert all(not peer.node.meetings.active for peer in peers)
        assert called.peer_id in {entry.peer_id for entry in third.book.live(0.0)}, "being busy is no fault"


async def test_a_caller_that_waits_for_a_hung_meeting_is_refused(swarm: Swarm) -> None:
    called, first, second = await acquainted(swarm, 3)
    one = asyncio.create_task(call(first, called))
    await swarm.until(lambda: called.node.meetings.active)
    swarm.network.partition([first.peer_id], [called.peer_id, second.peer_id])
    started_s = asyncio.get_running_loop().time()
    assert (await call(second, called)).refusal is RefusalCode.BUSY
    assert asyncio.get_running_loop().time() - started_s < LINE_UP_S + 0.5
    assert (await one).outcome is MeetingOutcome.FAILED


async def test_a_familiar_partner_has_a_shorter_connect_timeout(monkeypatch: pytest.MonkeyPatch, swarm: Swarm) -> None:
    monkeypatch.setattr(network, "DIAL_S", 1e3)  # a dead connection says nothing
    a, familiar, stranger = await acquainted(swarm, 3)
    assert (await call(a, familiar)).outcome is MeetingOutcome.COMPLETED
    swarm.network.partition([a.peer_id])
    for partner, within_s in ((familiar, AGAIN_S), (stranger, CONNECT_S)):
        began_s = asyncio.get_running_loop().time()
        assert (await call(a, partner)).outcome is MeetingOutcome.FAILED
        assert within_s <= asyncio.get_running_loop().time() - began_s < within_s + 0.5


async def test_a_training_peer_learns_the_end_from_a_peer_with_a_result(swarm: Swarm) -> None:
    trains, agreed = await acquainted(swarm, 2)
    agreed.lifecycle.has_agreed = True
    assert (await call(trains, agreed)).refusal is RefusalCode.WRONG_PHASE
    assert [entry.finished for entry in trains.book.live(asyncio.get_running_loop().time())] == [True]


async def test_a_node_limits_concurrent_calls_and_calls_each_partner_once(swarm: Swarm) -> None:
    a = (await acquainted(swarm, 4))[0]
    calls = [asyncio.create_task(a.node.meetings.try_next(fragment, set())) for fragment in range(MAX_OUTBOUND)]
    await swarm.until(lambda: len(a.node.meetings.active) == MAX_OUTBOUND)
    assert await a.node.meetings.try_next(MAX_OUTBOUND, set()) is None
    await asyncio.gather(*calls)
    assert len(a.partners()) == MAX_OUTBOUND


async def test_a_limit_of_the_line_lets_one_meeting_be_at_a_time_and_others_find_it_busy(swarm: Swarm) -> None:
    a, b, c = await acquainted(swarm, 3)
    a.own.line.limits[Direction.UP] = LEAST_BYTES_PER_S
    first = asyncio.create_task(a.node.meetings.try_next(0, {c.peer_id}))
    await swarm.until(lambda: a.node.meetings.active)
    assert await a.node.meetings.try_next(1, set()) is None
    called = await c.node.meetings.try_next(1, {b.peer_id})
    assert called is not None and called.refusal is RefusalCode.BUSY
    finish = await first
    assert finish is not None and finish.outcome is MeetingOutcome.COMPLETED


async def test_a_leaving_peer_begins_nothing_and_refuses_with_leaving(swarm: Swarm) -> None:
    a, b = await acquainted(swarm, 2)
    await b.node.meetings.leave(3.0)
    b.lifecycle.update(0, RunPhase.TRAIN, True)  # too late
    finish = await a.node.meetings.try_next(0, set())
    assert finish is not None and finish.refusal is RefusalCode.LEAVING
    assert a.book.soonest_s(asyncio.get_running_loop().time()) is None, "it would ask again"
    assert await b.node.meetings.try_next(0, set()) is None
