"""A peer of a swarm pauses, its trainer gone, and goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})


def completed(peer: Peer) -> int:
    return peer.outcomes()["completed"]


async def pause(peer: Peer) -> None:
    """As the supervisor does: the node rests, its meetings end, the trainer saves and goes."""
    peer.standing.rest()
    await peer.node.meetings.until_quiet()
    peer.save()
    peer.kill_trainer()


def test_the_others_go_on_without_it_and_call_it_again_when_it_is_back(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        first, second, third = swarm.start(3)
        await swarm.until(lambda: all(completed(peer) >= 3 for peer in swarm.peers))
        await pause(third)
        assert set(third.outcomes()) <= {"completed", "busy"}, "no meeting was broken off"
        await swarm.until(lambda: third.peer_id not in {entry.peer_id for peer in (first, second) for entry in peer.book.live(now())})
        called = [with_third(peer) for peer in (first, second)]
        before, clock = completed(first), third.clock
        await swarm.until(lambda: completed(first) >= before + 5)
        assert [with_third(peer) for peer in (first, second)] == called, "nobody called it"
        assert third.peer_id in {record.peer_id for record in await swarm.network.peers[first.peer_id].members()}
        third.standing.wake()
        third.restart_trainer()
        before = completed(third)
        await swarm.until(lambda: completed(third) >= before + 3)
        assert third.clock > clock

    def with_third(peer: Peer) -> int:
        return sum(done.partner == str(peer.swarm.peers[2].peer_id) for done in peer.meetings)

    def now() -> float:
        return asyncio.get_running_loop().time()

    play(Swarm(tmp_path, manifest=QUIET), story)
