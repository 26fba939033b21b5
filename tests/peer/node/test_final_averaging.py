"""The last averaging: the spread falls, nobody is waited for that is not there, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from peer.node.final_averaging import WAIT_S
from peer.node.node import CLOSE_S
from protocol.messages.messages import RunPhase
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

SHORT = tiny_manifest(run={"total_steps": 20})


def spread(peers: list[Peer]) -> float:
    fast = torch.stack([peer.fast for peer in peers])
    return float((fast - fast.mean(0)).square().mean(0).sum().sqrt())


def test_the_spread_of_the_fast_weights_falls_and_their_mean_stays(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = swarm.start(3)
        await swarm.until(lambda: all(peer.trainer.replica.phase is RunPhase.FINISH for peer in peers))
        before, mean = spread(peers), torch.stack([peer.fast for peer in peers]).mean(0)
        await swarm.until(lambda: all(peer.is_done for peer in peers))
        assert spread(peers) < 0.25 * before
        drift = float((torch.stack([peer.fast for peer in peers]).mean(0) - mean).norm())
        assert drift < before

    play(Swarm(tmp_path, manifest=SHORT), story)


def test_who_knows_nobody_is_done_at_once(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peer = swarm.add().start()
        await swarm.until(lambda: peer.trainer.replica.phase is RunPhase.FINISH)
        await swarm.until(lambda: peer.is_done, within_s=5.0)
        assert not peer.meetings

    play(Swarm(tmp_path, manifest=SHORT), story)


def test_one_that_never_comes_to_the_end_is_waited_for_only_so_long(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        quick, slow = swarm.add(), swarm.add()
        slow.trainer.frozen = True
        for peer in (quick, slow):
            peer.start()
        await swarm.until(lambda: quick.standing.finished, within_s=60.0)
        began_s = asyncio.get_running_loop().time()
        await swarm.until(lambda: quick.is_done, within_s=WAIT_S + CLOSE_S + 5.0)
        assert asyncio.get_running_loop().time() - began_s > 0.5 * WAIT_S, "it did not wait for one that is still training"
        assert not slow.is_done

    play(Swarm(tmp_path, manifest=SHORT), story)
