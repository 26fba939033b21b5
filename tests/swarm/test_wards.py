"""A stage that loses its last holder is taken over by one of the stage before, from its copy."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from gossamer.peer.machine.states import NO_LINE
from gossamer.peer.node import ward
from gossamer.peer.node.mates import ASKED, RANK_S
from gossamer.peer.node.ward import ASK_S, FRESH_S, LOOK_S, LOST_S, SIGN_S, Ward
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.sync.client import Source
from gossamer.peer.sync.sources import Sources
from gossamer.protocol.identity import PeerId
from tests.swarm.claims import STRANGER, STRANGERS, claim, claim_of, claiming, forge, staged, stay_silent
from tests.swarm.holders import Holder, StagedRun, play

MOVED_S = SIGN_S + LOST_S + RANK_S + 4 * ASK_S


async def have_copies(run: StagedRun, holders: list[Holder], stage: int) -> None:
    await run.until(lambda: all((holder.home.downloads / f"ward-{stage + 1}").exists() for holder in holders), 60.0)


def moved(run: StagedRun) -> list[Holder]:
    return [holder for holder in run.holders if holder.num_moves]


def all_see(holders: list[Holder], stage: int) -> bool:
    """Return whether these holders know that the stranger claims the stage."""
    return all(holder.peer.book.get(STRANGER.peer_id).stage == stage + 1 for holder in holders)


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


@pytest.mark.parametrize("seed", range(3))
def test_of_five_holders_one_takes_over_a_lost_stage(seed: int, tmp_path: Path) -> None:
    """The second one does not come first at the moment at which the first one leaves."""

    async def story(run: StagedRun) -> None:
        await have_copies(run, run.of(0), 1)
        run.of(1)[0].kill()
        await run.until(lambda: moved(run), MOVED_S)
        await asyncio.sleep(4 * RANK_S)
        assert [holder.num_moves for holder in moved(run)] == [1]

    run = staged(tmp_path, 0, 1, 0, 0, 0, 0, service_s=2.0)
    run.seed = seed
    play(run, story)


def test_the_last_holder_of_a_stage_never_leaves_it(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        first, last = run.holders
        await have_copies(run, [first], 1)
        last.kill()
        await asyncio.sleep(2 * MOVED_S)
        assert not moved(run)
        assert not [words for words in first.status.warnings if "is lost" in words], "it may be its own line"

    play(staged(tmp_path, 0, 1), story)


def test_the_last_holder_of_a_stage_that_hears_others_says_why_it_stays(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (first,), (middle,), (last,) = run.of(0), run.of(1), run.of(2)
        await have_copies(run, [middle], 2)
        last.kill()
        words = "stage 3 is lost, and this peer does not take it over: no other holder of stage 2 that this peer has met answers"
        await run.until(lambda: words in middle.status.warnings, MOVED_S)
        last.start()
        await run.until(lambda: not [words for words in middle.status.warnings if "is lost" in words], 60.0)
        assert not moved(run) and not [words for words in first.status.warnings if "is lost" in words]

    play(staged(tmp_path, 0, 1, 2, count=3), story)


@pytest.mark.parametrize(("stages", "count"), [((0, 0), 2), ((1, 1, 1), 3), ((2, 2, 0), 3)])
def test_before_the_first_step_a_holder_moves_to_an_empty_stage(stages: tuple[int, ...], count: int, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        await run.until(lambda: all(holder.trainer.steps >= 3 for holder in run.holders), (count - 1) * MOVED_S + 60.0)
        assert sorted(holder.trainer.stage for holder in run.holders) == list(range(count))  # type: ignore[type-var]

    play(staged(tmp_path, *stages, count=count, met=False), story)


def test_nobody_moves_to_an_empty_stage_after_the_first_step(tmp_path: Path) -> None:
    """Without a copy its weights would be lost."""

    async def story(run: StagedRun) -> None:
        run.holders[0].trainer.base_step = 1  # it knows its own step, and its mate the record of it
        await asyncio.sleep(2 * MOVED_S)
        assert not moved(run)

    play(staged(tmp_path, 0, 0), story)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_of_any_holder_keeps_all_from_moving_to_an_empty_stage(stage: int, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        async with claiming(run, claim(run, stage, global_step=1)):
            await asyncio.sleep(2 * MOVED_S)
            assert all_see(run.holders, stage) and not moved(run)
            assert all(holder.trainer.global_step == 0 for holder in run.holders)

    play(staged(tmp_path, 0, 0, count=3, met=False), story)


def test_forged_claims_move_a_holder_to_an_empty_stage_once(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (holder,) = run.holders
        async with claiming(run, claim(run, 0, answer=forge)):
            await run.until(lambda: holder.is_training and holder.trainer.stage == 1, MOVED_S)
        async with claiming(run, claim(run, 1, answer=forge)):
            await asyncio.sleep(2 * MOVED_S)
            assert all_see([holder], 1) and not holder.peer.book.is_banned(STRANGER.peer_id, asyncio.get_running_loop().time())
            assert holder.num_moves == 1 and holder.home.stage.read_text() == "2\n"

    play(staged(tmp_path, 0), story)


def test_silent_claims_with_small_ids_keep_no_stage_empty(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        crowd = sorted(STRANGERS, key=lambda stranger: stranger.peer_id)[: 2 * ASKED]
        assert crowd[ASKED - 1].peer_id < min(holder.peer_id for holder in run.holders)
        async with claiming(run, *(claim(run, 0, stranger=stranger) for stranger in crowd), strangers=crowd):
            await run.until(lambda: all(holder.trainer.steps >= 3 for holder in run.holders), 3 * MOVED_S)
            assert [holder.num_moves for holder in run.holders if holder.trainer.stage == 1] == [1]

    play(staged(tmp_path, 0, 0, met=False), story)


def test_the_minute_of_an_empty_stage_begins_anew_with_another_one(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        await asyncio.sleep(2 * ASK_S)
        async with claiming(run, claim(run, 1)):
            await run.until(lambda: all_see(run.holders, 1), 3 * ASK_S)
            await asyncio.sleep(LOST_S - 1.0)
            assert not moved(run)
            await run.until(lambda: moved(run) and moved(run)[0].is_training and moved(run)[0].trainer.stage == 2, MOVED_S)

    play(staged(tmp_path, 0, 0, count=3, met=False), story)


def test_a_claim_of_the_empty_stage_while_mates_are_asked_a_last_time_keeps_a_holder(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        async with claiming(run, claim(run, 0, answer=stay_silent)):  # so that the others' answers are waited for
            await run.until(lambda: any(holder.peer.lifecycle.stage == 2 for holder in run.holders), MOVED_S)
            for holder in run.holders:
                holder.peer.book.learn(claim_of(run, STRANGERS[0], 1), asyncio.get_running_loop().time())
            await asyncio.sleep(MOVED_S)
            assert not moved(run) and all(holder.peer.lifecycle.stage == 1 for holder in run.holders)

    play(staged(tmp_path, 0, 0, met=False), story)


def test_nobody_moves_to_a_stage_that_has_come_to_the_end_of_the_run(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        mates, (last,) = run.of(0), run.of(1)
        await have_copies(run, mates, 1)
        last.trainer.end()
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


@pytest.mark.parametrize(("silent_s", "cut_s"), [(0.0, 58.0), (0.0, 75.0), (30.0, 40.0), (50.0, 20.0)])
def test_nobody_moves_whose_own_line_fails(silent_s: float, cut_s: float, tmp_path: Path) -> None:
    """The last record of the next stage came so long before the failure: records come every 20 to 120 s."""

    async def story(run: StagedRun) -> None:
        mates, (last,) = sorted(run.of(0), key=lambda holder: holder.peer_id), run.of(1)
        await have_copies(run, mates, 1)
        await run.until(lambda: all(holder.trainer.steps >= 10 for holder in run.holders), 120.0)
        mates[0].peer.book.get(last.peer_id).seen_s -= silent_s
        run.network.partition([mates[0].peer_id])
        await asyncio.sleep(cut_s)
        run.network.partition()
        await asyncio.sleep(2 * MOVED_S)
        assert not moved(run)
        steps = last.trainer.steps
        await run.until(lambda: last.trainer.steps > steps + 2, 60.0)

    play(staged(tmp_path, 0, 1, 0, service_s=1.0), story)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_holder_that_is_cut_off_from_all_says_of_no_stage_that_it_is_lost(stage: int, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        victim, mate = run.of(stage)
        await have_copies(run, [victim, mate], 1 - stage)
        await run.until(lambda: all(holder.trainer.steps >= 10 for holder in run.holders), 120.0)
        run.network.partition([victim.peer_id])
        told: set[str] = set()
        for _ in range(int(MOVED_S)):
            await asyncio.sleep(2.0)
            told |= {victim.described()[1], *victim.status.warnings}
        assert not [words for words in told if "nobody holds" in words or "lost" in words]
        assert "this peer's line may be down" in victim.described()[1]
        assert victim.described()[2] == NO_LINE
        assert not moved(run)
        run.network.partition()
        steps = victim.trainer.steps
        await run.until(lambda: victim.trainer.steps > steps + 2, 60.0)
        assert not moved(run)

    play(staged(tmp_path, 0, 1, 0, 1, service_s=1.0), story)


@pytest.mark.parametrize("finished", [False, True])
def test_a_claim_of_a_stranger_that_lacks_the_weights_keeps_no_stage_lost(finished: bool, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        mates, (last,) = run.of(0), run.of(1)
        await have_copies(run, mates, 1)
        await run.until(lambda: all(holder.trainer.steps >= 10 for holder in run.holders), 120.0)
        async with claiming(run, claim(run, 1, 20, finished=finished)):
            await run.until(lambda: all_see(mates, 1), 120.0)
            last.kill()
            await run.until(lambda: moved(run) and moved(run)[0].trainer.stage == 1 and moved(run)[0].is_training, MOVED_S)

    play(staged(tmp_path, 0, 1, 0), story)


def test_a_mate_that_was_never_met_is_none(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        mates, (last,) = run.of(0), run.of(1)
        await have_copies(run, mates, 1)
        last.kill()
        await asyncio.sleep(3 * MOVED_S)
        assert not moved(run)
        assert all("no other holder of stage 1" in mate.warnings["lost stage"] for mate in mates)

    play(staged(tmp_path, 0, 1, 0, met=False), story)


def test_the_stage_of_a_single_holder_is_not_empty_for_it(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (holder,) = run.holders
        assert holder.peer.node is not None and holder.peer.node.ward is not None
        assert holder.peer.node.ward.find_empty_stage() is None

    run = StagedRun(tmp_path, 2, 0)
    run.add(fits=(0,))
    play(run, story)


def test_of_two_holders_that_decide_at_the_same_moment_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ward, "RANK_S", 0.0)

    async def story(run: StagedRun) -> None:
        mates, (last,) = run.of(0), run.of(1)
        await have_copies(run, mates, 1)
        await run.until(lambda: all(holder.trainer.steps >= 10 for holder in run.holders), 120.0)
        last.kill()
        for _ in range(int(MOVED_S)):
            await asyncio.sleep(2.0)
            assert len(moved(run)) < 2

    play(staged(tmp_path, 0, 1, 0), story)


def test_a_holder_that_is_killed_when_it_has_decided_to_move_shows_its_new_stage_before_its_trainer_is_there(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        mover, mate = run.of(0)
        mover.kill()
        mover.saved_step = None
        mover.home.left_stage.write_text("1\n")
        mover.home.stage.write_text("2\n")
        await asyncio.sleep(1.0)
        assert mate.peer.book.get(mover.peer_id).stage == 1
        mover.start()
        mover.trainer.built_s = 120.0
        await run.until(lambda: mate.peer.book.get(mover.peer_id).stage == 2, 25.0)
        assert mover.status.stage == "2 of 2" and mover.peer.node is None

    play(staged(tmp_path, 0, 1, 0), story)


def test_a_node_that_is_started_again_alone_keeps_copies_too(tmp_path: Path) -> None:
    """Its trainer has built its stage, and asks for none."""

    async def story(run: StagedRun) -> None:
        mate = run.of(0)[0]
        await have_copies(run, [mate], 1)
        mate.kill()
        (mate.home.downloads / "ward-2").unlink()
        mate.start().trainer.stage = 0
        await have_copies(run, [mate], 1)

    play(staged(tmp_path, 0, 1, 0), story)


def test_copies_of_stages_that_are_not_the_next_one_go_with_the_first_checkpoint(tmp_path: Path) -> None:
    """A peer that moves from stage to stage for months would keep copies of all of them."""
    run = staged(tmp_path, 0, 1, 0)
    downloads = run.holders[0].home.downloads
    downloads.mkdir(exist_ok=True)
    left = [downloads / name for name in ("ward-1.spare", "ward-1.spare.log", "ward-3.coming", "ward-3.coming.log", "ward-12.spare")]
    for file in left:
        file.write_bytes(b"")

    async def story(run: StagedRun) -> None:
        await have_copies(run, run.holders[:1], 1)
        assert all(file.exists() for file in left), "without a checkpoint they may be all that is left of a stage"
        (run.holders[0].home.checkpoints / "step-00000001").mkdir(parents=True)
        await run.until(lambda: not any(file.exists() for file in left), 10.0)
        assert (downloads / "ward-2").exists()

    play(run, story)


def make_old(folder: Path, age_s: float) -> None:
    for file in folder.iterdir():
        os.utime(file, (time.time() - age_s,) * 2)


@pytest.mark.parametrize("age_s", [2 * FRESH_S, -3600.0])
def test_a_copy_of_values_that_are_not_finite_replaces_no_good_one(age_s: float, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        mates, (last,) = run.of(0), run.of(1)
        await have_copies(run, mates, 1)
        downloads = mates[0].home.downloads
        last.kill()
        last.state = b"\x80\x7f" * 400
        last.start()
        await run.until(lambda: last.is_training and last.trainer.steps > 2, 60.0)
        make_old(downloads, age_s)
        await run.until(lambda: mates[0].peer.book.is_banned(last.peer_id, asyncio.get_running_loop().time()), 60.0)
        assert (downloads / "ward-2").read_bytes() == bytes(800)

    play(staged(tmp_path, 0, 1, 0), story)


@pytest.mark.parametrize("num_bytes", [4, 798, 802, 8000])
def test_a_copy_of_another_size_is_not_begun_and_bans_nobody(num_bytes: int, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        await run.until(lambda: all(holder.trainer.steps >= 10 for holder in run.holders), 120.0)
        await asyncio.sleep(60.0)
        for mate in run.of(0):
            assert not list(mate.home.downloads.glob("ward-*"))
            assert not mate.peer.book.is_banned(run.of(1)[0].peer_id, asyncio.get_running_loop().time())

    run = staged(tmp_path, 0, 1, 0)
    run.holders[1].state = bytes(num_bytes)
    play(run, story)


@pytest.mark.parametrize("how", ["refused by the trainer", "spoiled on the disk"])
def test_a_holder_whose_copy_is_not_adopted_moves_back_and_a_mate_takes_over(how: str, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        mates, (last,) = sorted(run.of(0), key=lambda holder: holder.peer_id), run.of(1)
        await have_copies(run, mates, 1)
        await run.until(lambda: all(holder.trainer.steps >= 10 for holder in run.holders), 120.0)
        mates[0].picky_at = 1 if how == "refused by the trainer" else None
        last.kill()
        if how == "spoiled on the disk":
            await run.until(lambda: mates[0].num_moves, MOVED_S)
            (mates[0].home.downloads / "ward-2.log").unlink()
        await run.until(lambda: mates[0].num_moves == 2, MOVED_S + 60.0)
        await run.until(lambda: mates[0].is_training and mates[0].trainer.stage == 0, 60.0)
        assert mates[0].home.stage.read_text() == "1\n" and not (mates[0].home.downloads / "ward-2").exists()
        await run.until(lambda: mates[1].num_moves == 1 and mates[1].is_training and mates[1].trainer.steps > 2, 2 * MOVED_S)
        await run.until(lambda: mates[0].trainer.steps > 2, 60.0)
        assert mates[0].num_moves == 2

    play(staged(tmp_path, 0, 1, 0), story)


def test_a_copy_is_adopted_again_after_each_crash_however_old_it_is(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        mates, (last,) = run.of(0), run.of(1)
        await have_copies(run, mates, 1)
        await run.until(lambda: all(holder.trainer.steps >= 10 for holder in run.holders), 120.0)
        last.kill()
        await run.until(lambda: moved(run), MOVED_S)
        (mover,) = moved(run)
        assert not (mover.home.downloads / "state").exists(), "a crash that loses home.stage would adopt it at the old stage"
        for _ in range(2):
            make_old(mover.home.downloads, 7200.0)
            await run.until(lambda: mover.is_training and mover.trainer.stage == 1 and mover.trainer.steps > 2, 60.0)
            assert len(mover.trainer.adopted) == 1
            mover.kill()
            mover.saved_step = None
            await asyncio.sleep(1.0)
            mover.start()

    play(staged(tmp_path, 0, 1, 0), story)


def test_an_error_of_the_watch_is_no_decision_to_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node ends with the error, and its supervisor starts it anew, in the same stage."""

    async def story(run: StagedRun) -> None:
        def fails(self: Ward) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(Ward, "find_empty_stage", fails)
        await asyncio.sleep(2 * ASK_S)
        assert not moved(run)
        for holder in run.holders:
            assert isinstance(holder.failure, ExceptionGroup)
            holder.failure = None

    play(staged(tmp_path, 0, 1, 0), story)


def test_a_holder_that_cannot_tell_whether_it_has_moved_once_stays(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        await asyncio.sleep(2 * MOVED_S)
        assert not moved(run)

    run = staged(tmp_path, 0, 0)
    for holder in run.holders:
        holder.home.filled.mkdir()  # nothing can be read there
    play(run, story)


def test_a_holder_without_room_for_a_copy_asks_nobody_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, opened = list[PeerId](), Sources.open

    def counted(self: Sources, peer: KnownPeer) -> AbstractAsyncContextManager[Source]:
        asked.append(peer.peer_id)
        return opened(self, peer)

    async def story(run: StagedRun) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: usage(total=1, used=1, free=0))
            patch.setattr(Sources, "open", counted)
            await asyncio.sleep(10 * LOOK_S)
        assert not asked and not moved(run)
        await have_copies(run, run.holders[:1], 1)

    usage = type(shutil.disk_usage(tmp_path))
    play(staged(tmp_path, 0, 1), story)
