"""A stage that loses its last holder is taken over by one of the stage before, from its copy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gossamer.peer.node.ward import LOST_S, RANK_S
from tests.swarm.holders import Holder, StagedRun, play

MOVED_S = LOST_S + RANK_S + 30.0


def staged(folder: Path, *stages: int, count: int = 2) -> StagedRun:
    """Holders of these stages, which can hold any other one too once they have begun."""
    run = StagedRun(folder, count, len(stages))
    for holder, stage in zip(run.holders, stages, strict=True):
        holder.home.stage.write_text(f"{stage + 1}\n")
    return run


async def have_copies(run: StagedRun, holders: list[Holder], stage: int) -> None:
    await run.until(lambda: all((holder.home.downloads / f"ward-{stage + 1}").exists() for holder in holders), 60.0)


def moved(run: StagedRun) -> list[Holder]:
    return [holder for holder in run.holders if holder.num_moves]


@pytest.mark.parametrize(("stages", "lost"), [((0, 1, 0), 1), ((0, 1, 1), 0), ((0, 1, 2, 0), 1), ((0, 1, 2, 2), 0)])
def test_the_first_of_the_stage_before_takes_over_a_lost_stage(stages: tuple[int, ...], lost: int, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        mates = run.of((lost - 1) % (max(stages) + 1))
        assert len(mates) == 2
        await have_copies(run, mates, lost)
        await run.until(lambda: all(holder.trainer.steps >= 10 for holder in run.holders), 120.0)
        (victim,) = run.of(lost)
        victim.kill()
        await run.until(lambda: moved(run), MOVED_S)
        (mover,) = moved(run)
        assert mover.peer_id == min(mate.peer_id for mate in mates)
        rest = [holder for holder in run.holders if holder is not victim]
        before = {holder: holder.trainer.steps for holder in rest if holder is not mover}
        await run.until(lambda: mover.is_training and mover.trainer.stage == lost, 30.0)
        await run.until(lambda: all(holder.trainer.steps > steps + 2 for holder, steps in before.items()), 60.0)
        assert (
            mover.trainer.adopted
            and mover.trainer.followed
            and mover.trainer.steps > 0
            and mover.status.stage == f"{lost + 1} of {max(stages) + 1}"
        )
        victim.start()
        await run.until(lambda: victim.is_training and victim.trainer.steps > 2, 60.0)
        await asyncio.sleep(30.0)
        assert moved(run) == [mover] and mover.num_moves == 1

    play(staged(tmp_path, *stages, count=max(stages) + 1), story)


def test_the_last_holder_of_a_stage_never_leaves_it(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        first, last = run.holders
        await have_copies(run, [first], 1)
        last.kill()
        await asyncio.sleep(2 * MOVED_S)
        assert not moved(run)
        assert "stage 2 is lost, and this peer does not take it over: this peer is the only holder of stage 1" in first.status.warnings
        last.start()
        await run.until(lambda: not [words for words in first.status.warnings if "is lost" in words], 60.0)

    play(staged(tmp_path, 0, 1), story)


def test_nobody_moves_to_a_stage_that_has_come_to_the_end_of_the_run(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        mates, (last,) = run.of(0), run.of(1)
        await have_copies(run, mates, 1)
        last.trainer.total_steps = last.trainer.steps
        await asyncio.sleep(15.0)
        last.peer.stop()
        await asyncio.sleep(1.0)
        last.kill()
        await asyncio.sleep(2 * MOVED_S)
        assert not moved(run)

    play(staged(tmp_path, 0, 1, 0), story)


def test_nobody_moves_for_a_holder_that_is_away_for_less_than_a_minute_or_without_a_copy(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        mates, (last,) = run.of(0), run.of(1)
        await have_copies(run, mates, 1)
        last.kill()
        await asyncio.sleep(0.7 * LOST_S)
        last.start()
        await run.until(lambda: last.is_training and last.trainer.steps > 2, 60.0)
        for mate in mates:
            (mate.home.downloads / "ward-2").unlink()
        last.kill()
        await asyncio.sleep(2 * MOVED_S)
        assert not moved(run)

    play(staged(tmp_path, 0, 1, 0), story)
