"""Holders of a staged run that die, that are slow, or that come back far from the others: real nodes, trainers that compute nothing."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from pathlib import Path

import pytest

from gossamer.peer.machine.states import NO_HOLDER
from gossamer.peer.node.stage_report import CLAIM_S
from gossamer.peer.node.ward import LOOK_S, MOST_AGAIN_S, Ward
from gossamer.peer.swarm.address_book import FORGET_S
from gossamer.peer.swarm.known_peer import HOP_S, PARTNER_HOPS, KnownPeer
from gossamer.peer.sync.decision import ALONE_S, UNSERVED_S
from gossamer.peer.sync.state_sync import UNSYNCED_S
from gossamer.protocol.errors import RefusalCode, Refused
from gossamer.protocol.limits import RECORD_NEWS_S
from tests.swarm.claims import know
from tests.swarm.holders import IN_BATCH, Holder, StagedRun, paced, play
from tests.swarm.test_stages_hostile import MALLORY, greeted

IDLE_S = 15.0  # at most, of anybody for one holder's death
BACK_S = 40.0  # until a holder that was started again carries hops
FAR_STEPS = 3000  # many times the gap that two partners may be apart


def now_s() -> float:
    return asyncio.get_running_loop().time()


def apart(folder: Path) -> StagedRun:
    """Two holders of each of two stages, none of whose devices holds the other stage."""
    run = StagedRun(folder, 2, 4)
    for holder, stage in zip(run.holders, (0, 1, 0, 1), strict=True):
        holder.fits = (stage,)
    return run


def longest_idle_s(holder: Holder, since_s: float) -> float:
    """Return the longest time without a request to a trainer, until now."""
    moments = [since_s, *(at_s for at_s in holder.trainer.served_s if at_s > since_s), now_s()]
    return max(after_s - before_s for before_s, after_s in itertools.pairwise(moments))


async def keeps_training(run: StagedRun, holders: list[Holder], within_s: float = 30.0) -> None:
    """Wait until all of these have made two more steps."""
    before = {holder: holder.trainer.steps for holder in holders}
    await run.until(lambda: all(holder.trainer.steps >= steps + 2 for holder, steps in before.items()), within_s)


@pytest.mark.parametrize("how", ["killed", "cut off"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nobody_idles_for_a_dead_holder_and_it_carries_hops_soon_after_its_return(stage: int, how: str, tmp_path: Path) -> None:
    """A killed holder resets its connections, one that is cut off falls silent."""

    async def story(run: StagedRun) -> None:
        await asyncio.sleep(30.0)
        victim = run.of(stage)[0]
        others = [holder for holder in run.holders if holder is not victim]
        died_s = now_s()
        if how == "cut off":
            run.network.partition([victim.peer_id])
            await asyncio.sleep(60.0)
        victim.kill()
        await asyncio.sleep(30.0)
        for other in others:
            assert longest_idle_s(other, died_s) <= IDLE_S
        run.network.partition()
        victim.start()
        await run.until(lambda: len(victim.trainer.served_s) >= IN_BATCH, BACK_S)
        await keeps_training(run, run.holders)
        for other in others:
            assert longest_idle_s(other, died_s) <= IDLE_S

    play(paced(tmp_path, 3, 6), story)


@pytest.mark.parametrize("away_s", [20.0, FORGET_S + 300.0])
@pytest.mark.parametrize("stage", [0, 1])
def test_without_any_holder_of_a_stage_the_others_say_so_and_rest_until_one_is_back(stage: int, away_s: float, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        await asyncio.sleep(20.0)
        lost, left = run.of(stage), run.of(1 - stage)
        for holder in lost:
            holder.kill()
        await asyncio.sleep(15.0)
        before, cpu_s, began_s = [holder.trainer.steps for holder in left], time.process_time(), now_s()
        for holder in left:
            state, reason, way_out = holder.described()
            assert (state, way_out) == ("waiting", NO_HOLDER)
            assert reason.startswith(f"no holder of stage {stage + 1} of 2 is in reach, last seen")
        await asyncio.sleep(away_s)
        assert [holder.trainer.steps for holder in left] == before
        assert time.process_time() - cpu_s < 0.05 * (now_s() - began_s), "a twentieth of a core"
        lost[0].start()
        await run.until(lambda: lost[0].is_training, BACK_S)
        await keeps_training(run, [lost[0]], 10.0)
        lost[1].start()
        await keeps_training(run, run.holders, BACK_S)

    play(apart(tmp_path), story)


def shares(run: StagedRun, since: dict[Holder, int]) -> tuple[float, int]:
    """Return the share of the first holder of the last stage in what both have added since then, and the sum."""
    first, second = (sum(holder.trainer.added.values()) - since[holder] for holder in run.of(1))
    return first / (first + second), first + second


@pytest.mark.parametrize(("factor", "least_share", "most_share"), [(4.0, 0.1, 0.3), (1.0, 0.4, 0.6)])
def test_a_slow_holder_takes_less_and_the_quick_one_is_kept_busy(
    factor: float, least_share: float, most_share: float, tmp_path: Path
) -> None:
    service_s, measured_s = 0.5, 150.0

    async def story(run: StagedRun) -> None:
        for holder in run.of(0):
            holder.trainer.service_s = 0.05  # the last stage sets the pace
        run.of(1)[0].trainer.service_s = factor * service_s
        await asyncio.sleep(30.0)
        since = {holder: sum(holder.trainer.added.values()) for holder in run.of(1)}
        await asyncio.sleep(measured_s)
        share, num_hops = shares(run, since)
        assert least_share < share < most_share
        assert num_hops >= 0.9 * measured_s * (1.0 / service_s + 1.0 / (factor * service_s)), "of what both can do"

    play(paced(tmp_path, 2, 4), story)


def test_holders_that_could_do_more_all_get_some_of_the_work(tmp_path: Path) -> None:
    """One of them could carry all hops; the other one has become slow for a while, and is quick again."""

    async def story(run: StagedRun) -> None:
        for holder in run.of(1):
            holder.trainer.service_s = 0.25
        first, second = run.of(1)
        first.trainer.service_s = 2.5
        await asyncio.sleep(30.0)
        first.trainer.service_s = 0.25
        await asyncio.sleep(30.0)
        since, began_s = {holder: sum(holder.trainer.added.values()) for holder in run.of(1)}, now_s()
        await asyncio.sleep(120.0)
        share, _ = shares(run, since)
        assert 0.3 < share < 0.7
        assert max(longest_idle_s(holder, began_s) for holder in run.holders) <= IDLE_S

    play(paced(tmp_path, 2, 4), story)


class Returned:
    """A run whose holders of other stages are at step FAR_STEPS, and what comes back from a long absence."""

    def __init__(self, run: StagedRun, *victims: Holder) -> None:
        self.run, self.victims = run, victims
        self.others = [holder for holder in run.holders if holder not in victims]

    async def come_back(self, others_step: int, victims_step: int) -> None:
        """Restart the others at one step and, after a while, the victims at another one."""
        for holder in self.run.holders:
            holder.kill()
        for holder in self.others:
            holder.saved_step = others_step
            holder.start()
        await asyncio.sleep(30.0)
        for victim in self.victims:
            victim.saved_step = victims_step
            victim.start()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_holder_that_comes_back_far_behind_takes_the_weights_of_its_stage(stage: int, tmp_path: Path) -> None:
    """It is refused every lane, so it makes no step, begins no meeting and is refused none."""

    async def story(run: StagedRun) -> None:
        victim = run.of(stage)[0]
        returned = Returned(run, victim)
        await returned.come_back(FAR_STEPS, 50)
        await run.until(lambda: victim.trainer.adopted and victim.trainer.steps >= 2, BACK_S)
        assert victim.trainer.global_step >= FAR_STEPS
        await keeps_training(run, run.holders)

    play(paced(tmp_path, 3, 6), story)


@pytest.mark.parametrize("stage", [0, 1])
def test_both_holders_of_a_stage_that_come_back_far_behind_go_on_with_their_own_weights(stage: int, tmp_path: Path) -> None:
    """Nobody else has any of this stage."""

    async def story(run: StagedRun) -> None:
        victims = run.of(stage)
        returned = Returned(run, *victims)
        await returned.come_back(FAR_STEPS, 50)
        await run.until(lambda: all(victim.trainer.steps >= 2 for victim in victims), UNSERVED_S + BACK_S)
        assert all(holder.trainer.global_step >= FAR_STEPS for holder in run.holders), "and nobody goes back to them"
        assert all(FAR_STEPS - 60 < victim.status.lost_steps < FAR_STEPS + 200 for victim in victims)
        await keeps_training(run, run.holders)

    play(apart(tmp_path), story)


def begun(run: StagedRun) -> StagedRun:
    """Have a run go on from checkpoints of its step 40."""
    for holder in run.holders:
        holder.saved_step = 40
    return run


async def come_back_older(victim: Holder) -> None:
    """Kill a holder, and start it from a checkpoint that lacks its last 20 steps."""
    victim.kill()
    assert victim.saved_step is not None
    victim.saved_step -= 20
    await asyncio.sleep(5.0)
    victim.start()
    for holder in victim.run.holders:
        holder.trainer.service_s = 2.0  # minutes pass with few events


@pytest.mark.parametrize("num_holders", [2, 4])
@pytest.mark.parametrize("stage", [0, 1])
def test_the_only_holder_of_a_stage_says_how_many_steps_its_checkpoint_lacks(stage: int, num_holders: int, tmp_path: Path) -> None:
    """Its neighbours are near enough to carry hops with it at once. A second holder has these steps: nothing is lost."""

    async def story(run: StagedRun) -> None:
        victim = run.of(stage)[0]
        await run.until(lambda: victim.trainer.global_step >= 44)
        await come_back_older(victim)
        await asyncio.sleep(CLAIM_S + 30.0 if num_holders == 2 else CLAIM_S + RECORD_NEWS_S + 30.0)
        if num_holders == 2:
            assert 15 <= victim.status.lost_steps <= 24
        assert all(not holder.status.lost_steps for holder in run.holders if num_holders > 2 or holder is not victim)

    play(begun(paced(tmp_path, 2, num_holders)), story)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_claim_of_a_dead_holder_hides_no_lost_steps(stage: int, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        victim, mate = run.of(stage)
        await run.until(lambda: victim.trainer.global_step >= 44)
        mate.kill()
        await come_back_older(victim)
        await run.until(lambda: victim.peer.book.get(mate.peer_id).stage == stage + 1)
        await run.until(lambda: victim.status.lost_steps, CLAIM_S + RECORD_NEWS_S + 30.0)
        assert 15 <= victim.status.lost_steps <= 24
        assert all(not holder.status.lost_steps for holder in run.holders if holder is not victim)

    play(begun(paced(tmp_path, 2, 4)), story)


@pytest.mark.parametrize("steps_behind", [-10, 100])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_holder_that_comes_back_from_an_older_checkpoint_takes_the_weights_of_its_mate(
    stage: int, steps_behind: int, tmp_path: Path
) -> None:
    """It is near enough to carry hops at once: a meeting would take the mate back by half of the steps that it lacks."""

    async def story(run: StagedRun) -> None:
        victim, mate = run.of(stage)
        know(victim, [mate.peer_id], met=True, saved_s=run.network.now_s())
        returned = Returned(run, victim)
        await returned.come_back(FAR_STEPS, FAR_STEPS - steps_behind)
        if steps_behind == 100:
            await run.until(lambda: victim.trainer.synced, 20.0)
            assert victim.trainer.synced[0] >= FAR_STEPS and mate.trainer.coded == 1
        await run.until(lambda: victim.peer.lifecycle.may_meet and not victim.peer.lifecycle.stale, 20.0)
        await keeps_training(run, run.holders)
        assert not mate.trainer.synced and not victim.trainer.adopted
        assert bool(victim.trainer.synced) == (steps_behind == 100)

    play(paced(tmp_path, 2, 4), story)


def test_both_holders_of_a_stage_that_come_back_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        older, newer = run.of(1)
        for one, other in ((older, newer), (newer, older)):
            know(one, [other.peer_id], met=True, saved_s=run.network.now_s())
        for holder in run.holders:
            holder.kill()
            holder.saved_step = FAR_STEPS
        older.saved_step = FAR_STEPS - 100
        await asyncio.sleep(5.0)
        for holder in run.holders:
            holder.start()
        await run.until(lambda: older.trainer.synced, 20.0)
        assert not newer.trainer.synced and not newer.peer.lifecycle.stale
        await keeps_training(run, run.holders)

    play(paced(tmp_path, 2, 4), story)


def test_a_holder_meets_with_its_own_weights_where_the_mate_with_newer_ones_gives_none(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        victim, mate = run.of(1)
        know(victim, [mate.peer_id], met=True, saved_s=run.network.now_s())
        mate.gives_fragments = False
        returned = Returned(run, victim)
        await returned.come_back(FAR_STEPS, FAR_STEPS - 100)
        await run.until(lambda: victim.peer.lifecycle.stale, 20.0)
        await asyncio.sleep(UNSYNCED_S / 2)
        assert victim.peer.lifecycle.stale and victim.trainer.steps >= 2, "it trains meanwhile"
        await run.until(lambda: not victim.peer.lifecycle.stale, UNSYNCED_S)
        assert not victim.trainer.synced

    play(paced(tmp_path, 2, 4), story)


def test_a_neighbour_that_lacks_the_same_steps_hides_no_lost_ones(tmp_path: Path) -> None:
    """The only holder of the last stage and one of two drivers come back; they hear the other driver a minute later."""

    async def story(run: StagedRun) -> None:
        run.add(fits=(0,)).start()
        await run.until(lambda: len(run.of(0)) == 2)
        (older, newer), (last,) = run.of(0), run.of(1)
        await run.until(lambda: min(holder.trainer.global_step for holder in run.holders) >= 44)
        run.network.partition([newer.peer_id])
        for holder in (older, last):
            await come_back_older(holder)
        steps = last.trainer.steps
        await run.until(lambda: last.trainer.steps >= steps + 2, 60.0)
        run.network.partition()
        await run.until(lambda: last.status.lost_steps, CLAIM_S + RECORD_NEWS_S + 90.0)
        assert 6 <= last.status.lost_steps <= 18, "steps that it has made again are not lost"
        assert not older.status.lost_steps and not newer.status.lost_steps

    play(begun(paced(tmp_path, 2, 2)), story)


@pytest.mark.parametrize("joins_s", [0.0, 100.0])
def test_a_newcomer_hides_no_lost_steps(joins_s: float, tmp_path: Path) -> None:
    """The only other holder of the stage is dead; a newcomer takes the weights of the one that came back from an older checkpoint."""

    async def story(run: StagedRun) -> None:
        victim, mate = run.of(1)
        returned = Returned(run, victim, mate)
        returned.victims = (victim,)
        await returned.come_back(FAR_STEPS, FAR_STEPS - 20)
        await asyncio.sleep(joins_s)
        newcomer = run.add(fits=(1,)).start()
        await run.until(lambda: newcomer.trainer.adopted, 60.0)
        await run.until(lambda: victim.status.lost_steps, CLAIM_S + RECORD_NEWS_S + 60.0 - joins_s)
        assert 15 <= victim.status.lost_steps <= 40, "those of its slow minutes too"

    play(StagedRun(tmp_path, 2, 4, service_s=2.0), story)


def test_a_holder_that_comes_back_far_ahead_of_all_goes_back_after_a_while(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        victim = run.of(1)[0]
        returned = Returned(run, victim)
        await returned.come_back(50, FAR_STEPS)
        await asyncio.sleep(ALONE_S / 2)
        assert victim.trainer.global_step >= FAR_STEPS and victim.trainer.steps == 0
        await run.until(lambda: victim.trainer.steps >= 2, ALONE_S)
        assert victim.trainer.global_step < FAR_STEPS
        await keeps_training(run, run.holders)

    play(StagedRun(tmp_path, 2, 4, service_s=1.0), story)


def test_a_holder_whose_copies_of_the_next_stage_fail_tries_less_and_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else many that copy from one holder would keep it busy with refusals."""
    tried_s, copy, num_refused = list[float](), Ward._copy, 5

    async def copy_later(ward: Ward, holder: KnownPeer) -> None:
        if ward.own_stage == 1:
            tried_s.append(now_s())
            if len(tried_s) <= num_refused:
                raise Refused(RefusalCode.BUSY)
        await copy(ward, holder)

    async def story(run: StagedRun) -> None:
        file = run.of(0)[0].home.downloads / "ward-2"
        await run.until(file.exists, 200.0)
        waits_s = [after_s - before_s for before_s, after_s in itertools.pairwise(tried_s)]
        assert waits_s == sorted(waits_s) and waits_s[0] < 3 * LOOK_S and waits_s[-1] >= MOST_AGAIN_S
        os.utime(file, (0.0, 0.0))
        await run.until(lambda: len(tried_s) == num_refused + 2, 3 * LOOK_S)

    monkeypatch.setattr(Ward, "_copy", copy_later)
    play(StagedRun(tmp_path, 2, 2, service_s=2.0), story)


def test_a_partner_of_a_lane_is_no_stranger(tmp_path: Path) -> None:
    """One that opens a lane and answers nothing is one; a partner that was killed is none."""

    async def story(run: StagedRun) -> None:
        first, last = run.of(0)[0], run.of(1)[0]
        await run.until(lambda: first.peer.has_met(last.peer_id) and last.peer.has_met(first.peer_id), 2 * PARTNER_HOPS * HOP_S)
        await greeted(run, victim=0, stage=1)
        await asyncio.sleep(5.0)
        assert MALLORY.peer_id in [lane.partner for lane in first.pipeline.carrier.down.values()]
        assert not first.peer.has_met(MALLORY.peer_id)
        last.kill()
        await asyncio.sleep(5.0)
        assert first.peer.has_met(last.peer_id)
        assert not first.peer.book.get(last.peer_id).has_met, "hops give no vote about weights"

    play(paced(tmp_path, 2, 2), story)
