"""Peers die and come back at random for minutes on end: nothing is applied twice, nobody hangs, nothing piles up."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from gossamer.protocol.memory.conversation import Link as Wire
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})


def healthy(peer: Peer) -> bool:
    """Return whether every fragment of a peer is where it should be between meetings: open in a meeting that its node knows, or in none."""
    known = {active.meeting.number for active in peer.node.meetings.active.values()}
    return all(fragment.meeting is None or fragment.meeting in known for fragment in peer.trainer.replica.fragments)


@pytest.mark.parametrize(("nodes_only", "seed"), [(False, 1), (True, 2)])
def test_random_deaths(tmp_path: Path, nodes_only: bool, seed: int) -> None:
    async def story(swarm: Swarm) -> None:
        draws = random.Random(seed)
        swarm.kills_nodes_only = nodes_only
        peers = swarm.start(4)
        for peer in peers:
            peer.save()
        await swarm.until(lambda: all(peer.num_completed >= 1 for peer in peers))
        for _ in range(12):
            victim = draws.choice(peers)
            victim.kill()
            await asyncio.sleep(draws.uniform(0.1, 4.0))
            if nodes_only:
                victim.start_node()
            else:
                victim.start()
                victim.save()
            await asyncio.sleep(draws.uniform(0.1, 3.0))
        for peer in peers:
            assert all(count == 1 for count in peer.trainer.applied.values())
            assert not peer.outcomes()["misbehaved"], "an honest peer was blamed"
        counts = [peer.num_completed for peer in peers]
        await swarm.until(lambda: all(peer.num_completed >= n + 3 for peer, n in zip(peers, counts, strict=True)), within_s=70.0)
        await swarm.until(lambda: all(healthy(peer) for peer in peers), within_s=30.0)

    play(Swarm(tmp_path, seed=seed, manifest=QUIET), story)


@pytest.mark.parametrize("seed", [3])
def test_flapping_partitions_on_a_bad_line(tmp_path: Path, seed: int) -> None:
    """Cut for a second or for longer than keep-alive bears, into ever other halves."""

    async def story(swarm: Swarm) -> None:
        draws = random.Random(seed)
        peers = swarm.start(4)
        for _ in range(15):
            half = draws.sample(peers, 2)
            swarm.network.partition([peer.peer_id for peer in half])
            await asyncio.sleep(draws.choice([0.3, 1.0, 5.0]))
            swarm.network.partition()
            await asyncio.sleep(draws.uniform(0.2, 3.0))
        for peer in peers:
            assert all(count == 1 for count in peer.trainer.applied.values())
            assert not peer.outcomes()["misbehaved"]
        both = [peer.trainer.applied for peer in peers]
        known = set().union(*both)
        alone = [meeting for meeting in known if sum(meeting in applied for applied in both) == 1]
        under_way = {active.meeting.pairing.meeting_id.hex() for peer in peers for active in peer.node.meetings.active.values()}
        assert not set(alone) - under_way, "nobody died, so every decision could be delivered"
        counts = [peer.num_completed for peer in peers]
        await swarm.until(lambda: all(peer.num_completed >= n + 3 for peer, n in zip(peers, counts, strict=True)), within_s=60.0)

    play(Swarm(tmp_path, seed=seed, manifest=QUIET, wire=Wire(0.1, 0.2, 20_000.0, silence_s=3.0)), story)


def test_hundreds_of_meetings_leave_nothing_behind(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        a, b = swarm.start(2)
        for peer in (a, b):
            peer.trainer.frozen = True
        await asyncio.sleep(25.0)
        sizes = []
        for _ in range(3):
            for _ in range(60):
                assert await a.node.searches.search(0)
            await asyncio.sleep(10.0)
            sizes.append((len(asyncio.all_tasks()), len(a.book), len(a.node.meetings.active), len(b.node.meetings.active)))
            for peer in (a, b):
                assert not list(peer.payloads.path("x").parent.iterdir())
                assert all(fragment.meeting is None for fragment in peer.trainer.replica.fragments)
        assert sizes[0] == sizes[1] == sizes[2]

    play(Swarm(tmp_path, manifest=QUIET), story)
