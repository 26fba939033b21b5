"""A peer that leaves is gone within its grace, whatever its partners ask for, hold, or leave unsaid."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.peer.meeting.interface import MeetingState
from gossamer.peer.node.peer import FAREWELL_S, LEAVE_S
from gossamer.peer.swarm.peer_exchange import LAST_WORD_S
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.messages.messages import ContentsKind, FetchRequest, Opening
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import cancel, loop_s
from tests.protocol.samples import changed
from tests.swarm.mallory import MALLORY, hello_to
from tests.swarm.slow import SlowPeer, add_slow, pester, with_slow_lines
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})

Attack = Callable[[Swarm, Peer], Awaitable[None]]


async def stay_silent(purpose: Purpose, stream: Stream) -> None:
    """Take what comes, and say nothing: the caller waits."""
    with contextlib.suppress(GossamerError):
        while True:
            await stream.receive()


async def go_silent_in_meetings(swarm: Swarm, victim: Peer) -> None:
    transport = swarm.network.start_peer(MALLORY.peer_id, stay_silent)
    for fragment, terms in enumerate(swarm.terms.fragments):
        stream = await transport.connect(victim.peer_id, (), Purpose.MEET)
        hello = changed(hello_to(swarm, victim.peer_id), fragment=fragment, payload_bytes=terms.payload_bytes, nonce=os.urandom(16))
        await stream.send(replace(hello, global_step=victim.global_step, signature=b"").signed(MALLORY))
    await asyncio.Future()


async def ask_for_state(swarm: Swarm, victim: Peer) -> None:
    """Ask for pieces of the state, one after another, on a new stream whenever one ends."""
    transport = swarm.network.start_peer(MALLORY.peer_id, stay_silent)
    while True:
        with contextlib.suppress(GossamerError):
            stream = await transport.connect(victim.peer_id, (), Purpose.FETCH)
            while True:
                await stream.send(state_request(swarm, victim))
                for _ in range(2):
                    await stream.receive()
        await asyncio.sleep(0.05)


def state_request(swarm: Swarm, victim: Peer) -> FetchRequest:
    opening = Opening(1, swarm.terms.run_id, MALLORY.peer_id, victim.peer_id, os.urandom(16))
    return FetchRequest(opening, ContentsKind.STATE, 0, 1000).signed(MALLORY)


async def answer_no_request(swarm: Swarm, victim: Peer) -> None:
    """Be asked by the victim for all that it asks others, and say nothing."""
    swarm.network.start_peer(MALLORY.peer_id, stay_silent)
    victim.book.add_address(MALLORY.peer_id, "/ip4/192.0.2.66/tcp/1", loop_s())
    await asyncio.Future()


def is_held(victim: Peer) -> bool:
    return any(
        active.meeting.state in (MeetingState.COMMITTING, MeetingState.AWAITING_DECISION) for active in victim.node.meetings.active.values()
    )


async def take_long_over_meetings(swarm: Swarm, victim: Peer) -> None:
    slow = next(peer for peer in swarm.peers if isinstance(peer, SlowPeer))
    await pester(slow, victim)


HOLDING = [go_silent_in_meetings, take_long_over_meetings]  # these have the victim in a meeting when it is to leave
ATTACKS = [go_silent_in_meetings, ask_for_state, answer_no_request, take_long_over_meetings]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_no_partner_keeps_a_peer_from_leaving(tmp_path: Path, attack: Attack) -> None:
    async def story(swarm: Swarm) -> None:
        victim, _ = swarm.start(2)
        add_slow(swarm).start()
        await swarm.until(lambda: all(peer.num_completed >= 2 for peer in swarm.peers))
        attacking = asyncio.create_task(attack(swarm, victim))
        await swarm.until(lambda: loop_s() > 30.0 and (attack not in HOLDING or is_held(victim)))
        began_s = loop_s()
        victim.peer.stop()
        await victim.until_over()
        assert loop_s() - began_s <= LEAVE_S + FAREWELL_S
        assert victim.is_done and swarm.network.records[victim.peer_id].expires_s < swarm.network.now_s() + LAST_WORD_S, "no farewell"
        victim.kill()
        await cancel(attacking)

    play(Swarm(tmp_path, manifest=QUIET, wrap=with_slow_lines), story)
