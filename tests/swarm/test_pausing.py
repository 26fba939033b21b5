"""A peer of a swarm pauses, its trainer gone, and goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gossamer.protocol.tasks import loop_s
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})


def calls_with(peer: Peer, other: Peer) -> int:
    return sum(done.partner == str(other.peer_id) for done in peer.meetings)


def is_calling(peer: Peer, other: Peer) -> bool:
    return any(active.meeting.partner == other.peer_id for active in peer.node.meetings.active.values())


async def pause(peer: Peer) -> None:
    """As the supervisor does: the node rests, its meetings end, the trainer saves and goes."""
    peer.lifecycle.pause()
    await peer.node.meetings.until_quiet()
    peer.save()
    peer.kill_trainer()


def test_the_others_go_on_without_it_and_call_it_again_when_it_is_back(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        first, second, third = swarm.start(3)
        await swarm.until(lambda: all(peer.num_completed >= 3 for peer in swarm.peers))
        await pause(third)
        assert set(third.outcomes()) <= {"completed", "busy"}, "no meeting was broken off"
        await swarm.until(lambda: third.peer_id not in {entry.peer_id for peer in (first, second) for entry in peer.book.live(loop_s())})
        await swarm.until(lambda: not any(is_calling(peer, third) for peer in (first, second)))  # who was chosen before
        called = [calls_with(peer, third) for peer in (first, second)]
        before, clock = first.num_completed, third.global_step
        await swarm.until(lambda: first.num_completed >= before + 5)
        assert [calls_with(peer, third) for peer in (first, second)] == called, "nobody called it"
        assert third.peer_id in {record.peer_id for record in await swarm.network.peers[first.peer_id].members()}
        third.lifecycle.resume()
        third.restart_trainer()
        before = third.num_completed
        await swarm.until(lambda: third.num_completed >= before + 3)
        assert third.global_step > clock

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_joiner_that_pauses_on_its_way_has_its_weights_soon_after_it_goes_on(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        residents = swarm.start(2)
        await swarm.until(lambda: all(peer.num_completed >= 3 and peer.global_step > 40 for peer in residents))
        joiner = swarm.add(waits_for_start=True, is_founder=False).start()
        await swarm.until(lambda: any(reported.state == "joining" for reported in joiner.reported))
        joiner.lifecycle.pause()
        joiner.kill_trainer()
        await asyncio.sleep(30.0)
        assert not joiner.num_completed
        joiner.lifecycle.resume()
        joiner.restart_trainer()
        await swarm.until(lambda: joiner.num_completed >= 2)
        assert joiner.transfers, "it took over what the others give"

    play(Swarm(tmp_path, manifest=QUIET), story)
