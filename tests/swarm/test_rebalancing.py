"""Holders leave a crowded stage for one that limits everybody: one after the other, and not because others lie."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gossamer.peer.node import rebalancing
from gossamer.peer.node.mates import RANK_S
from gossamer.peer.node.rebalancing import TURN_S, WAITING_LOOKS, WAITING_SHARE
from gossamer.peer.node.ward import LOST_S, SIGN_S
from gossamer.peer.sync.pieces import PIECE_BYTES
from gossamer.peer.sync.state_sync import FOUND_S
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import SLOWEST_BYTES_PER_S
from tests.swarm.claims import STRANGERS, claim, claiming, forging, know, staged, trickling
from tests.swarm.holders import Holder, StagedRun, play

SERVICE_S = 4.0  # of a micro-batch at a trainer: hours pass with few events
STEP = 500  # of all checkpoints
SETTLED_S = 60.0  # in these stories
FIRST_S = SETTLED_S + WAITING_LOOKS
SOON_S = 900.0  # after that: turns of holders that do not move pass
SEEDS = range(3)
MEASURED_S = 300.0
WATCHED_S = 600.0  # in which nobody moves back


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalancing, "SETTLED_S", SETTLED_S)


def crowded(folder: Path, *stages: int, seed: int = 0, count: int = 2, liars: Sequence[Identity] = ()) -> StagedRun:
    """Holders of these stages that have all met each other and these liars, as after hours of training."""
    run = staged(folder, *stages, count=count, service_s=SERVICE_S)
    run.seed = seed
    for holder in run.holders:
        holder.saved_step = STEP
        know(holder, [*(other.peer_id for other in run.holders if other is not holder), *(liar.peer_id for liar in liars)], met=True)
    return run


@asynccontextmanager
async def lying(run: StagedRun, liars: Sequence[Identity], stage: int) -> AsyncIterator[None]:
    """Have members claim a stage, and give forged weights of it of the right time and size."""

    def step() -> int:
        return max(holder.trainer.global_step for holder in run.holders)

    for liar in liars:
        run.network.places[liar.peer_id] = "/ip4/203.0.113.7/tcp/4001"  # one network: they are one Sybil group
    claims = [claim(run, stage, STEP, stranger=liar, answer=forging(liar, step)) for liar in liars]
    async with claiming(run, *claims, strangers=liars):
        yield


def shares(run: StagedRun) -> list[int]:
    held = Counter(holder.trainer.stage for holder in run.holders if run.network.is_up(holder.peer_id))
    return [held[stage] for stage in range(run.manifest.num_stages)]


def num_moves(run: StagedRun) -> int:
    return sum(holder.num_moves for holder in run.holders)


async def rate(*holders: Holder) -> float:
    """Return the micro-batches a second that these holders train."""

    def num_trained() -> int:
        return sum(sum(holder.trainer.added.values()) for holder in holders)

    before = num_trained()
    await asyncio.sleep(MEASURED_S)
    return (num_trained() - before) / MEASURED_S


@pytest.mark.parametrize("seed", SEEDS)
def test_of_four_holders_one_moves_to_a_single_one(seed: int, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (narrow,) = run.of(0)
        await run.until(lambda: narrow.trainer.steps >= 3, 200.0)
        before = await rate(narrow)
        await run.until(lambda: num_moves(run) == 1, FIRST_S + SOON_S)
        (mover,) = [holder for holder in run.holders if holder.num_moves]
        await run.until(lambda: mover.is_training and mover.trainer.stage == 0 and mover.trainer.steps >= 3, 300.0)
        assert mover.trainer.adopted, "it has the weights of the stage from the other holder"
        after = await rate(narrow, mover)
        assert after > 1.6 * before
        await asyncio.sleep(WATCHED_S)
        assert shares(run) == [2, 3] and num_moves(run) == 1

    play(crowded(tmp_path, 0, 1, 1, 1, 1, seed=seed), story)


@pytest.mark.parametrize(("stages", "after"), [((0, 1, 1, 1, 1, 1, 1), [3, 4]), ((0, 1, 1, 1, 1, 1, 2), [2, 3, 2])])
def test_holders_move_one_after_the_other_until_no_stage_is_crowded(stages: tuple[int, ...], after: list[int], tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        before = shares(run)
        needed = sum(max(0, had - has) for had, has in zip(before, after, strict=True))
        for moved in range(1, needed + 1):
            await run.until(lambda moved=moved: num_moves(run) == moved, FIRST_S + SOON_S)
            await asyncio.sleep(TURN_S / 2 - 5.0)
            assert num_moves(run) == moved, "one in each turn"
        await asyncio.sleep(WATCHED_S)
        assert shares(run) == after and num_moves(run) == needed

    play(crowded(tmp_path, *stages, count=max(stages) + 1), story)


@pytest.mark.parametrize("stages", [(0, 1, 1), (0, 0, 1, 1, 1), (0, 1, 2, 2)])
def test_the_last_two_holders_of_a_stage_stay(stages: tuple[int, ...], tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        before = shares(run)
        await asyncio.sleep(WATCHED_S)
        assert shares(run) == before and not num_moves(run)

    play(crowded(tmp_path, *stages, count=max(stages) + 1), story)


def test_holders_with_work_stay(tmp_path: Path) -> None:
    """Three slow holders are busy with what one fast one sends them."""

    async def story(run: StagedRun) -> None:
        await asyncio.sleep(WATCHED_S)
        assert all(holder.carrying.waiting.share < WAITING_SHARE for holder in run.of(1)) and not num_moves(run)

    run = crowded(tmp_path, 0, 1, 1, 1, 1)
    for holder in run.holders[1:]:
        holder.service_s = 8 * SERVICE_S
    play(run, story)


@pytest.mark.parametrize("seed", SEEDS)
def test_liars_that_nobody_has_met_move_no_holder_of_their_stage(seed: int, tmp_path: Path) -> None:
    """They claim the stage of two holders that wait for work, give weights, and have small ids."""
    liars = sorted(STRANGERS, key=lambda liar: liar.peer_id)[:8]

    async def story(run: StagedRun) -> None:
        async with lying(run, liars, 1):
            await asyncio.sleep(FIRST_S + WATCHED_S)
            assert all(len(holder.peer.book.claimed(2, asyncio.get_running_loop().time())) == 9 for holder in run.of(1))
            assert all(holder.carrying.waiting.share >= WAITING_SHARE for holder in run.of(1)) and not num_moves(run)

    play(crowded(tmp_path, 0, 1, 1, seed=seed), story)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sybil_group_that_has_met_all_counts_as_one_holder(seed: int, tmp_path: Path) -> None:
    """Of two holders that wait for work beside eight liars, one moves; the other one is not left alone with the liars."""
    liars = STRANGERS[:8]

    async def story(run: StagedRun) -> None:
        async with lying(run, liars, 1):
            await asyncio.sleep(FIRST_S + WATCHED_S)
            assert shares(run) in ([1, 2], [2, 1]) and num_moves(run) <= 1

    play(crowded(tmp_path, 0, 1, 1, seed=seed, liars=liars), story)


def test_claims_of_a_crowded_stage_do_not_keep_its_holders_there(tmp_path: Path) -> None:
    """Each liar is drawn as often as an honest holder, and does not move."""

    async def story(run: StagedRun) -> None:
        async with claiming(run, *(claim(run, 1, STEP, stranger=liar) for liar in STRANGERS[:4]), strangers=STRANGERS[:4]):
            await run.until(lambda: num_moves(run) == 1, FIRST_S + SOON_S)
            await asyncio.sleep(WATCHED_S)
            assert shares(run) == [2, 3] and num_moves(run) == 1

    play(crowded(tmp_path, 0, 1, 1, 1, 1), story)


async def moved_to_a_dead_stage(run: StagedRun) -> Holder:
    """Return a holder that has moved to a stage whose only holder died at that moment."""
    (narrow,) = run.of(0)
    await run.until(lambda: num_moves(run) == 1, FIRST_S + SOON_S)
    narrow.kill()
    (mover,) = [holder for holder in run.holders if holder.num_moves]
    return mover


def test_a_holder_whose_new_stage_dies_before_it_has_weights_goes_back(tmp_path: Path) -> None:
    """The others have met it, so its claim keeps them from taking the lost stage over; they do so once it is back."""

    async def story(run: StagedRun) -> None:
        await run.until(lambda: all((holder.home.downloads / "ward-1").exists() for holder in run.of(1)), 120.0)
        mover = await moved_to_a_dead_stage(run)
        await run.until(lambda: mover.num_moves == 2 and mover.trainer.stage == 1, FOUND_S + 60.0)
        assert mover.home.stage.read_text() == "2\n" and not mover.home.left_stage.exists()
        await run.until(lambda: [holder for holder in run.of(0) if holder.num_moves], SIGN_S + LOST_S + 4 * RANK_S + 60.0)
        (heir,) = [holder for holder in run.of(0) if holder.num_moves]
        await run.until(lambda: heir.is_training and heir.trainer.adopted and heir.trainer.steps >= 2, 300.0)
        assert shares(run) == [1, 3] and num_moves(run) == 3

    play(crowded(tmp_path, 0, 1, 1, 1, 1), story)


def test_a_holder_that_goes_back_still_has_its_copy_of_the_stage_that_died(tmp_path: Path) -> None:
    """No other holder has a copy of the dead stage, so the mover takes the stage over from its own copy."""

    async def story(run: StagedRun) -> None:
        await run.until(lambda: all((holder.home.downloads / "ward-1").exists() for holder in run.of(1)), 120.0)
        mover = await moved_to_a_dead_stage(run)
        for other in run.of(1):
            if other is not mover:
                (other.home.downloads / "ward-1").unlink()
        await run.until(lambda: mover.num_moves == 2 and mover.trainer.stage == 1, FOUND_S + 60.0)
        await run.until(lambda: mover.num_moves == 3 and mover.is_training, SIGN_S + LOST_S + 4 * RANK_S + 120.0)
        await run.until(lambda: mover.trainer.stage == 0 and mover.trainer.adopted and mover.trainer.steps >= 2, 300.0)
        assert shares(run) == [1, 3] and num_moves(run) == 3

    play(crowded(tmp_path, 0, 1, 1, 1, 1), story)


def test_a_source_of_one_piece_in_minutes_keeps_a_holder_that_moves_for_a_limited_time(tmp_path: Path) -> None:
    num_bytes, liar = 20 * PIECE_BYTES, STRANGERS[0]

    async def story(run: StagedRun) -> None:
        def step() -> int:
            return max(holder.trainer.global_step for holder in run.holders)

        answer = trickling(liar, num_bytes, step, FOUND_S - 50.0)
        async with claiming(run, claim(run, 0, STEP, stranger=liar, answer=answer), strangers=[liar]):
            mover = await moved_to_a_dead_stage(run)
            await run.until(lambda: mover.is_started and mover.trainer.stage == 0, 60.0)
            await asyncio.sleep(FOUND_S)
            assert mover.num_moves == 1, "a piece has come"
            await run.until(lambda: mover.num_moves == 2 and mover.trainer.stage == 1, num_bytes / SLOWEST_BYTES_PER_S + 60.0)

    run = crowded(tmp_path, 0, 1, 1, 1, 1, liars=[liar])
    for holder in run.holders:
        holder.state = bytes(num_bytes)
    play(run, story)
