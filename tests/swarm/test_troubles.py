"""What a swarm does when peers die, hang, are cut off, or have nobody to meet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from gossamer.protocol.memory.conversation import Link as Wire
from gossamer.protocol.streams.transport import Purpose
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})


def list_peers(*peers: Peer) -> None:
    for peer in peers:
        for other in peers:
            peer.book.add_address(other.peer_id, "/ip4/192.0.2.1/tcp/4001", asyncio.get_running_loop().time())


def test_a_partner_dies_in_the_middle_and_the_next_one_is_tried(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        swarm.network.counted = frozenset({Purpose.MEET})
        peers = swarm.start(4)
        for peer in peers:
            peer.trainer.frozen = True
        list_peers(*peers)
        await asyncio.sleep(2.0)
        for peer in peers[1:3]:
            swarm.network.kill_at(peer.peer_id, sent=2)
        for _ in range(3):  # the last one is to rest while these are chosen
            peers[0].book.note_refusal(peers[3].peer_id, asyncio.get_running_loop().time())
        assert await peers[0].node.searches.search(0)
        assert peers[0].outcomes() == {"failed": 2, "completed": 1}
        assert peers[0].partners() == {str(peers[3].peer_id): 1}
        assert not peers[0].trainer.solo

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_without_an_answer_the_fragment_takes_a_solo_step_at_the_deadline(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        a, b = swarm.start(2)
        await swarm.until(lambda: a.num_completed >= 3)
        swarm.network.refuse(b.peer_id)
        b.kill()
        num_solo, num_met = len(a.trainer.solo), a.num_completed
        await asyncio.sleep(60.0)
        assert a.num_completed <= num_met + 1
        assert len(a.trainer.solo) >= num_solo + 9
        assert a.trainer.replica.own_steps >= 230, "training waited"
        assert set(a.trainer.solo) == {0, 1, 2}

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_without_partners_defer_waits(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)
        before = peer.slow.clone()
        await swarm.until(lambda: peer.trainer.replica.own_steps >= 60)
        assert torch.equal(peer.slow, before) and not peer.trainer.solo
        assert peer.trainer.replica.fragments[0].since.tokens == peer.trainer.replica.tokens, "what was learnt still counts"
        (late,) = swarm.start(1)
        late.trainer.replica.global_step = peer.global_step
        await swarm.until(lambda: peer.num_completed >= 3)

    play(Swarm(tmp_path, manifest=tiny_manifest(outer={"no_partner": "defer"})), story)


def test_host_and_bootstrap_are_killed_and_the_rest_go_on(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        host, *rest = swarm.start(4)
        await swarm.until(lambda: all(peer.num_completed >= 2 for peer in swarm.peers))
        host.kill()
        counts = [peer.num_completed for peer in rest]
        await asyncio.sleep(25.0)
        for peer, count in zip(rest, counts, strict=True):
            assert peer.num_completed >= count + 6
        assert all(peer.trainer.replica.own_steps > 95 for peer in rest), "training waited"

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_killed_peer_restarts_from_its_checkpoint_and_is_met_again(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = swarm.start(3)
        await swarm.until(lambda: all(peer.num_completed >= 4 for peer in peers))
        victim = peers[1]
        victim.save()
        saved = victim.hash
        await asyncio.sleep(5.0)
        victim.kill()
        await asyncio.sleep(5.0)
        victim.start()
        assert victim.hash == saved
        count = victim.num_completed
        await swarm.until(lambda: victim.num_completed > count + 2 and len(victim.partners()) == 2, within_s=30.0)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_partition_heals(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = swarm.start(4)
        await swarm.until(lambda: all(peer.num_completed >= 2 for peer in peers))
        sides = peers[:2], peers[2:]
        swarm.network.partition(*([peer.peer_id for peer in side] for side in sides))
        await asyncio.sleep(15.0)
        before = [peer.partners() for peer in peers]
        await asyncio.sleep(15.0)
        for peer, earlier in zip(peers, before, strict=True):
            assert len(peer.partners() - earlier) == 1, "each side has only itself"
        apart = swarm.spread()
        swarm.network.partition()
        for peer in peers:
            peer.meetings.clear()
        await swarm.until(lambda: all(len(peer.partners()) == 3 for peer in peers), within_s=60.0)
        await asyncio.sleep(20.0)
        assert swarm.spread() < apart

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 100_000}, outer={"max_clock_gap_steps": 80})), story)


def test_a_silent_partner_leaves_time_for_another(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        a, b, c = swarm.start(3)
        for peer in swarm.peers:
            peer.trainer.frozen = True
        list_peers(a, b, c)
        await asyncio.sleep(2.0)
        for _ in range(2):  # is to rest while the other is chosen
            a.book.note_refusal(c.peer_id, asyncio.get_running_loop().time())
        meeting = asyncio.create_task(a.node.searches.search(0))
        await asyncio.sleep(0.1)
        swarm.network.partition([b.peer_id])
        assert await meeting, "it leaves no time for another"
        assert a.partners() == {str(c.peer_id): 1}
        await asyncio.sleep(40.0)
        assert not b.node.meetings.active and b.trainer.replica.fragments[0].meeting is None

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_thin_line_drops_meetings_and_never_the_training(tmp_path: Path) -> None:
    """A payload of 8 KiB needs four times the deadline."""

    async def story(swarm: Swarm) -> None:
        peers = swarm.start(3)
        await asyncio.sleep(60.0)
        for peer in peers:
            assert peer.outcomes()["failed"] + peer.outcomes()["refused"] > 0
            assert not peer.outcomes()["misbehaved"], "slow is not bad"
            assert peer.trainer.replica.own_steps >= 235
            assert len(peer.trainer.solo) >= 10
            assert peer.trainer.applied.total() == peer.num_completed

    play(Swarm(tmp_path, manifest=QUIET, wire=Wire(latency_s=0.3, bytes_per_s=200.0)), story)


def test_node_is_restarted_and_what_was_due_is_still_met(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = swarm.start(3)
        swarm.kills_nodes_only = True
        await swarm.until(lambda: all(peer.num_completed >= 2 for peer in peers))
        victim, steps = peers[0], peers[0].trainer.replica.own_steps
        for _ in range(5):
            victim.kill()
            await asyncio.sleep(1.3)
            victim.start_node()
            await asyncio.sleep(2.2)
        assert victim.trainer.replica.own_steps >= steps + 5 * 14 - 1, "training waited for the node"
        count = victim.num_completed
        await swarm.until(lambda: victim.num_completed >= count + 6, within_s=20.0)
        assert max(victim.trainer.applied.values()) == 1

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_trainer_is_restarted_and_the_node_finds_it_again(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = swarm.start(3)
        await swarm.until(lambda: all(peer.num_completed >= 2 for peer in peers))
        victim = peers[0]
        for _ in range(5):
            victim.save()
            victim.kill_trainer()
            await asyncio.sleep(1.1)
            victim.restart_trainer()
            count = victim.num_completed
            await swarm.until(lambda count=count: victim.num_completed > count, within_s=15.0)
        for peer in peers:
            assert not peer.outcomes()["misbehaved"]

    play(Swarm(tmp_path, manifest=QUIET), story)
