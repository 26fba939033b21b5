"""Holders leave a crowded stage for one that limits everybody: one after the other, and not because others lie."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from gossamer.peer.node import rebalancing
from gossamer.peer.node.rebalancing import SETTLED_S, TURN_S, WAITING_LOOKS
from tests.swarm.claims import STRANGER, STRANGERS, claim, claiming, forging, know, staged
from tests.swarm.holders import Holder, StagedRun, play

SERVICE_S = 2.0  # of a micro-batch at a trainer: hours pass with few events
FIRST_S = SETTLED_S + WAITING_LOOKS
SOON_S = 1200.0  # after that: turns of holders that do not move pass


def crowded(folder: Path, *stages: int, seed: int = 0, count: int = 2) -> StagedRun:
    """Holders of these stages that have all met each other, as after hours of training."""
    run = staged(folder, *stages, count=count)
    run.seed = seed
    for holder in run.holders:
        holder.service_s = SERVICE_S
        know(holder, [other for other in run.holders if other is not holder], met=True)
    return run


def shares(run: StagedRun) -> list[int]:
    held = Counter(holder.trainer.stage for holder in run.holders if run.network.is_up(holder.peer_id))
    return [held[stage] for stage in range(run.manifest.num_stages)]


def num_moves(run: StagedRun) -> int:
    return sum(holder.num_moves for holder in run.holders)


async def rate(run: StagedRun, holder: Holder, seconds: float) -> float:
    """Return the micro-batches a second that a holder answers."""
    before = sum(holder.trainer.added.values())
    await asyncio.sleep(seconds)
    return (sum(holder.trainer.added.values()) - before) / seconds


@pytest.mark.parametrize("seed", range(10))
def test_of_four_holders_one_moves_to_a_single_one(seed: int, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (narrow,) = run.of(0)
        await run.until(lambda: narrow.trainer.steps >= 3, 300.0)
        before = await rate(run, narrow, 300.0)
        await run.until(lambda: num_moves(run) == 1, FIRST_S + SOON_S)
        (mover,) = [holder for holder in run.holders if holder.num_moves]
        await run.until(lambda: mover.is_training and mover.trainer.stage == 0 and mover.trainer.steps >= 3, 300.0)
        assert mover.trainer.adopted, "it has the weights of the stage from the other holder"
        after = await rate(run, narrow, 300.0) + await rate(run, mover, 300.0)
        assert after > 1.6 * before
        await asyncio.sleep(3 * FIRST_S)
        assert shares(run) == [2, 3] and num_moves(run) == 1

    play(crowded(tmp_path, 0, 1, 1, 1, 1, seed=seed), story)
