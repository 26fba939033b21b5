"""A stage that loses its last holder is taken over by one of the stage before, from its copy."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gossamer.peer.node import ward
from gossamer.peer.node.ward import ASK_S, FRESH_S, LOST_S, RANK_S, SIGN_S
from gossamer.protocol.errors import PeerGone, RefusalCode
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import Refusal
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.swarm.holders import ADDRESSES, Holder, StagedRun, play

MOVED_S = SIGN_S + LOST_S + RANK_S + 4 * ASK_S
STRANGER = Identity(b"s" * 32)  # on the list of members, and no holder


def staged(folder: Path, *stages: int, count: int = 2, met: bool = True) -> StagedRun:
    """Holders of these stages, which can hold any other one too once they have begun."""
    run = StagedRun(folder, count, len(stages), others=[STRANGER])
    for holder, stage in zip(run.holders, stages, strict=True):
        holder.home.stage.write_text(f"{stage + 1}\n")
        mates = [other for other, at in zip(run.holders, stages, strict=True) if at == stage and other is not holder]
        know(holder, mates, met=met)
    return run


def know(holder: Holder, others: list[Holder], *, met: bool) -> None:
    """Give a holder the address book of an earlier session: scripted trainers exchange no weights, so holders meet nobody in this one."""
    known = [{"peer": str(other.peer_id), "addresses": list(ADDRESSES), "met": met} for other in others]
    holder.home.peers.write_text(json.dumps({"saved_s": None, "known": known, "banned": []}))


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
        assert (
            "stage 2 is lost, and this peer does not take it over: no other holder of stage 1 that this peer has met answers"
            in first.status.warnings
        )
        last.start()
        await run.until(lambda: not [words for words in first.status.warnings if "is lost" in words], 60.0)

    play(staged(tmp_path, 0, 1), story)


@pytest.mark.parametrize(("stages", "count"), [((0, 0), 2), ((1, 1, 1), 3), ((2, 2, 0), 3)])
def test_before_the_first_step_a_holder_moves_to_a_stage_that_nobody_has_ever_held(
    stages: tuple[int, ...], count: int, tmp_path: Path
) -> None:
    async def story(run: StagedRun) -> None:
        await run.until(lambda: all(holder.trainer.steps >= 3 for holder in run.holders), (count - 1) * MOVED_S + 60.0)
        assert sorted(holder.trainer.stage for holder in run.holders) == list(range(count))  # type: ignore[type-var]

    play(staged(tmp_path, *stages, count=count, met=False), story)


def test_nobody_moves_to_a_stage_that_nobody_holds_after_the_first_step(tmp_path: Path) -> None:
    """Without a copy its weights would be lost."""

    async def story(run: StagedRun) -> None:
        for holder in run.holders:
            holder.trainer.base_step = 1
        await asyncio.sleep(2 * MOVED_S)
        assert not moved(run)

    play(staged(tmp_path, 0, 0), story)


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

    play(staged(tmp_path, 0, 1, 0), story)


async def claim(run: StagedRun, stage: int, *, finished: bool) -> None:
    """Claim a stage for a stranger without weights, for ever."""

    async def refuse(purpose: Purpose, stream: Stream) -> None:
        with suppress(PeerGone):
            await stream.receive()
            await stream.send(Refusal(RefusalCode.NOT_READY))

    run.network.start_peer(STRANGER.peer_id, refuse)
    while True:
        now_s = int(run.network.now_s())
        record = MemberRecord(run.manifest.run_id, STRANGER.peer_id, ADDRESSES, 20, finished, now_s, now_s + 90, None, stage=stage + 1)
        await run.network.peers[STRANGER.peer_id].announce(record.signed(STRANGER))
        await asyncio.sleep(10.0)


@pytest.mark.parametrize("finished", [False, True])
def test_a_claim_of_a_stranger_that_lacks_the_weights_keeps_no_stage_lost(finished: bool, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        mates, (last,) = run.of(0), run.of(1)
        await have_copies(run, mates, 1)
        await run.until(lambda: all(holder.trainer.steps >= 10 for holder in run.holders), 120.0)
        claiming = asyncio.create_task(claim(run, 1, finished=finished))
        await run.until(lambda: all(mate.peer.book.get(STRANGER.peer_id).stage == 2 for mate in mates), 120.0)
        last.kill()
        await run.until(lambda: moved(run) and moved(run)[0].trainer.stage == 1 and moved(run)[0].is_training, MOVED_S)
        claiming.cancel()
        run.network.kill(STRANGER.peer_id)

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


def test_of_two_holders_that_decide_at_the_same_moment_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ward, "RANK_S", 0.0)

    async def story(run: StagedRun) -> None:
        mates, (last,) = run.of(0), run.of(1)
        await have_copies(run, mates, 1)
        await run.until(lambda: all(holder.trainer.steps >= 10 for holder in run.holders), 120.0)
        last.kill()
        for _ in range(200):
            await asyncio.sleep(2.0)
            assert len(moved(run)) < 2

    play(staged(tmp_path, 0, 1, 0), story)


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
