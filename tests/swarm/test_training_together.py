"""What meetings do to a swarm that nothing disturbs."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
import torch

from gossamer.peer.trainer import boundary as boundary_module
from tests.peer.open_gates import open_probes
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play


def train(swarm: Swarm, num_steps: int) -> list[Peer]:
    """Four peers for so many steps; returned as they were at the end."""

    async def story(swarm: Swarm) -> None:
        peers = swarm.start(4)
        await swarm.until(lambda: min(peer.trainer.replica.own_steps for peer in peers) >= num_steps)

    play(swarm, story)
    return swarm.peers


def test_a_swarm_stays_together_and_peers_apart_do_not(tmp_path: Path) -> None:
    together = Swarm(tmp_path / "together", seed=1)
    peers = train(together, 100)
    apart = Swarm(tmp_path / "apart", seed=1)

    async def alone(swarm: Swarm) -> None:
        swarm.network.partition(*([peer.peer_id] for peer in [swarm.add() for _ in range(4)]))
        for peer in swarm.peers:
            peer.start()
        await swarm.until(lambda: min(peer.trainer.replica.own_steps for peer in swarm.peers) >= 100)

    play(apart, alone)
    assert together.spread() < 0.5 * apart.spread()
    assert all(len(peer.partners()) == 3 for peer in peers), "some two never met"
    assert sum(sum(peer.trainer.losses[-10:]) for peer in peers) < sum(sum(peer.trainer.losses[:10]) for peer in peers)
    assert all(not peer.partners() and peer.trainer.solo for peer in apart.peers)


def test_after_each_evaluation_one_meeting_reports_how_far_it_moves_the_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_module, "EVAL_INTERVAL_STEPS", 20)
    for peer in train(Swarm(tmp_path), 70):
        assert 2 <= len(peer.trainer.moved_outputs) <= 4
        assert all(0.0 < moved.distance < 0.7 and moved.fragment < 3 for moved in peer.trainer.moved_outputs)


def test_the_same_seed_is_the_same_swarm(tmp_path: Path) -> None:
    hashes = [[peer.hash for peer in train(Swarm(tmp_path / str(run), seed=seed), 30)] for run, seed in enumerate((3, 3, 4))]
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]


@pytest.mark.parametrize("codec", ["int8", "modulo4"])
def test_meetings_keep_the_mean_of_the_slow_weights_and_shrink_their_spread(tmp_path: Path, codec: str) -> None:
    """With nothing learnt in between, and no momentum of earlier meetings, a meeting may only pull a pair together, evenly."""
    swarm = Swarm(tmp_path, manifest=tiny_manifest(codec={"name": codec}, outer={"alpha": 0.0}))

    async def story(swarm: Swarm) -> None:
        peers = [swarm.add() for _ in range(4)]
        draws = torch.Generator().manual_seed(1)
        open_probes([peer.trainer.replica for peer in peers])
        for peer in peers:
            peer.trainer.frozen = True
            for fragment in peer.trainer.replica.fragments:
                fragment.slow += 0.02 * torch.randn(fragment.slow.shape, generator=draws)
                fragment.gate.restore({"reach": 100.0, "allowance": 100.0, "gaps": []})
            _follow(peer)
            peer.start()
        mean, spread = torch.stack([peer.slow for peer in peers]).double().mean(0), swarm.spread()
        for peer in peers:
            for other in peers:
                peer.book.add_address(other.peer_id, "/ip4/192.0.2.1/tcp/4001", 0.0)
        await swarm.until(lambda: all(peer.lifecycle.may_meet for peer in peers))
        for _ in range(7):
            for peer in peers:
                for fragment in range(3):
                    await peer.node.meetings.try_next(fragment, set())
                    _follow(peer)
        num_meetings = sum(peer.num_completed for peer in peers)
        assert num_meetings >= 130
        assert swarm.spread() < 0.1 * spread
        drift = (torch.stack([peer.slow for peer in peers]).double().mean(0) - mean).abs().max()
        assert drift < 1e-6  # rounding of float32, hundreds of times

    def _follow(_: Peer) -> None:
        """Let fast weights be the slow ones: nothing was learnt."""
        for peer in swarm.peers:
            replica = peer.trainer.replica
            for fragment in replica.fragments:
                if fragment.meeting is None:
                    start = 0
                    for piece in fragment.codec.fragment.pieces:
                        values = fragment.slow[start : start + piece.numel]
                        replica.parameters[piece.name].data.copy_(values.view_as(replica.parameters[piece.name]))
                        start += piece.numel

    play(swarm, story)


def test_peers_of_unequal_speed_meet_and_the_clock_carries_the_slow_along(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        fast, slow = swarm.start(2, step_s=0.1), swarm.start(2, step_s=0.4)
        await swarm.until(lambda: fast[0].trainer.replica.own_steps >= 180)
        for peer in swarm.peers:
            assert len(peer.partners()) == 3
        for peer in slow:
            assert peer.trainer.replica.own_steps < 0.3 * fast[0].trainer.replica.own_steps
            assert peer.global_step > 0.75 * fast[0].global_step  # as of its last meeting
            assert not peer.trainer.solo[1:]  # one perhaps, before anybody was known
        for one, other in itertools.permutations(swarm.peers, 2):
            part = one.peer.records.trust(other.peer_id).most_part
            assert 0.15 < part < 0.4 if one in fast and other in slow else part == 1.0
        for peer in swarm.peers:
            places = {str(peer.book.get(other.peer_id).place) for other in swarm.peers if other is not peer}
            assert set().union(*(fragment.gate.state()["gaps"] for fragment in peer.trainer.replica.fragments)) == places

    play(Swarm(tmp_path), story)


def test_two_peers_that_call_each_other_at_once_have_one_meeting(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        for _ in range(8):
            a, b = swarm.add(), swarm.add()
            for peer, other in ((a, b), (b, a)):
                peer.trainer.frozen = True
                peer.start()
                peer.book.add_address(other.peer_id, "/ip4/192.0.2.1/tcp/4001", 0.0)
                for stranger in swarm.peers[:-2]:
                    peer.book.ban(stranger.peer_id, 0.0, "a test")
            await swarm.until(lambda a=a, b=b: a.lifecycle.may_meet and b.lifecycle.may_meet)
            searches = [peer.node.searches.search(0) for peer in (a, b)]
            assert await asyncio.gather(*searches) == [True, True]
            assert a.num_completed == b.num_completed == 1
            assert not a.outcomes()["misbehaved"] and not b.outcomes()["misbehaved"]

    play(Swarm(tmp_path), story)
