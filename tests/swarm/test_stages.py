"""Real nodes of a staged run among each other, with trainers that compute nothing."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.peer.link.messages import HopFile
from gossamer.peer.machine.config import NODE
from gossamer.peer.machine.states import NO_HOLDER, NO_LINE
from gossamer.peer.meeting.line import Direction
from gossamer.peer.node import carrying
from gossamer.peer.node.carrying import LOOK_S
from gossamer.peer.pipeline.greeting import LaneSide
from gossamer.peer.pipeline.hop import HopState
from gossamer.peer.supervisor.children import LEAVE_S
from gossamer.peer.sync.state_sync import FOUND_S
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import Lane
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.terms import BATCHES_AWAY
from gossamer.protocol.streams.transport import Stream
from tests.swarm.holders import IN_BATCH, TOKEN_BYTES, VALUE_BYTES, StagedRun, play


@pytest.mark.parametrize(("num_stages", "num_holders"), [(2, 2), (3, 3), (2, 4)])
def test_holders_choose_their_stages_by_need_and_train_together(num_stages: int, num_holders: int, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        assert [len(run.of(stage)) for stage in range(num_stages)] == [num_holders // num_stages] * num_stages
        await run.until(lambda: all(holder.trainer.steps >= 5 for holder in run.holders))
        for holder in run.holders:
            stage = holder.trainer.stage
            assert holder.status.stage == f"{stage + 1} of {num_stages}"
            assert holder.peer.node.meetings.caller.book.stage == stage + 1
            assert {entry.stage for entry in holder.peer.book.live(asyncio.get_running_loop().time())} <= {0, stage + 1}

    play(StagedRun(tmp_path, num_stages, num_holders), story)


def test_bytes_losses_and_lanes_are_counted(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (first,), (last,) = run.of(0), run.of(1)
        await run.until(lambda: first.trainer.steps >= 20 and first.trainer.losses)
        await asyncio.sleep(6.0)
        hops = first.status.hops
        assert (hops["lanes_below"], hops["lanes_above"]) == (0, 1) and hops["loss"] == 2.5
        assert hops["outcomes"]["measured"] == len(first.trainer.losses) >= 4
        there = hops["outcomes"]["trained"] + hops["outcomes"]["measured"]
        assert 1.0 < hops["sent"] / (there * (TOKEN_BYTES + VALUE_BYTES)) < 1.1
        assert 0.95 < hops["received"] / (hops["outcomes"]["trained"] * VALUE_BYTES) < 1.1
        assert last.status.hops["outcomes"]["answered"] >= there
        before = first.pipeline.carried_bytes()
        first.pipeline.end_lane(next(iter(first.pipeline.lanes.values())), "a test")
        assert min(now - was for now, was in zip(first.pipeline.carried_bytes(), before, strict=True)) >= 0, "while its last message leaves"

    play(StagedRun(tmp_path, 2, 2), story)


def test_the_line_of_each_holder_is_measured_for_its_trainer(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        await run.until(lambda: all(holder.own.line.probed_bytes_per_s for holder in run.holders))
        for holder in run.holders:
            assert 1e6 < holder.own.line.probed_bytes_per_s < 4e7, "the network carries 2e7 bytes a second"
            holder.own.line.limits[Direction.UP] = 5e5
            assert holder.own.line.feeding_bytes_per_s == 5e5

    play(StagedRun(tmp_path, 2, 2), story)


def test_a_stage_with_fewer_holders_keeps_the_pace_of_its_drivers(tmp_path: Path) -> None:
    """Three drivers share one last stage. Each of its steps holds three batches, and no clock runs ahead of the drivers' steps."""

    async def story(run: StagedRun) -> None:
        for _ in range(2):
            run.add(fits=(0,)).start()
        (last,) = run.of(1)
        last.trainer.service_s = 0.02
        await run.until(lambda: len(run.of(0)) == 3 and min(driver.trainer.steps for driver in run.of(0)) >= 30, 200.0)
        assert last.trainer.global_step <= max(driver.trainer.global_step for driver in run.of(0)) + BATCHES_AWAY
        assert all(driver.trainer.steps == driver.trainer.global_step for driver in run.of(0)), "nobody has followed another's step"
        assert sum(last.trainer.added.values()) > 2 * IN_BATCH * last.trainer.steps

    play(StagedRun(tmp_path, 2, 2), story)


def test_a_driver_with_an_earlier_checkpoint_follows_the_clock_of_the_next_stage(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (first,), (last,) = run.of(0), run.of(1)
        last.trainer.base_step = 30
        await run.until(lambda: first.trainer.followed)
        assert first.trainer.followed[0] == 30 - BATCHES_AWAY

    play(StagedRun(tmp_path, 2, 2), story)


def test_no_step_that_a_neighbour_tells_leads_to_the_end_of_the_run(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (middle,) = run.of(1)
        await run.until(lambda: all(holder.trainer.steps >= 3 for holder in run.holders))
        for open_lane in list(middle.pipeline.lanes.values()):
            middle.carrying.on_clock(open_lane, 110)
            assert middle.trainer.followed[-1] == 99

    play(StagedRun(tmp_path, 3, 3, total_steps=100), story)


def test_a_holder_that_opens_a_lane_downwards_holds_to_the_window_that_it_has_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it bans the driver for its second hop, where another driver's lane has opened since the greeting."""
    greet, run = LaneSide.open, StagedRun(tmp_path, 2, 3)
    for holder, stage in zip(run.holders, (0, 0, 1), strict=True):
        holder.fits = (stage,)

    async def slowly(side: LaneSide, stream: Stream, stage: int, rng: random.Random) -> Lane:
        theirs = await greet(side, stream, stage, rng)
        if stage < side.membership.terms.own_stage:
            monkeypatch.setattr(carrying, "DOWN_LANES", 4)  # the other driver calls meanwhile
            await run.until(lambda: run.holders[-1].pipeline.carrier.up)
        return theirs

    monkeypatch.setattr(LaneSide, "open", slowly)
    monkeypatch.setattr(carrying, "DOWN_LANES", 0)

    async def story(run: StagedRun) -> None:
        (last,) = run.of(1)
        await run.until(lambda: all(holder.trainer.steps >= 5 for holder in run.holders))
        assert not any(last.peer.book.is_banned(driver.peer_id, asyncio.get_running_loop().time()) for driver in run.of(0))

    play(run, story)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_killed_holder_is_missed_for_a_few_seconds_only(stage: int, tmp_path: Path) -> None:
    """Its neighbours go on with the other holder of the stage, and with it once it is back."""

    async def story(run: StagedRun) -> None:
        victim = run.of(stage)[0]
        rest = [holder for holder in run.holders if holder is not victim]
        await asyncio.sleep(5.0)
        victim.kill()
        drivers = [holder for holder in rest if holder.trainer.stage == 0]
        before = {driver.peer_id: driver.trainer.steps for driver in drivers}
        await run.until(lambda: all(driver.trainer.steps > before[driver.peer_id] + 2 for driver in drivers), 15.0)
        victim.start()
        await run.until(lambda: victim.is_training and victim.trainer.steps >= 2, 40.0)
        assert victim.trainer.stage == stage, "its home keeps the choice"

    play(StagedRun(tmp_path, 3, 6), story)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_trainer_that_dies_loses_its_hops_and_nothing_else(stage: int, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        await asyncio.sleep(5.0)
        victim = run.of(stage)[0]
        victim.trainer.kill()
        await asyncio.sleep(3.0)
        victim.trainer.is_up = True
        victim.trainer.added.clear()
        victim.trainer.steps = 0
        await run.until(lambda: victim.trainer.steps >= 5)
        assert victim.pipeline.lanes

    play(StagedRun(tmp_path, 2, 2), story)


def test_a_stage_that_nobody_holds_is_reported_with_a_way_out_and_the_run_goes_on_with_its_next_holder(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        await asyncio.sleep(5.0)
        (first,), (last,) = run.of(0), run.of(1)
        last.kill()
        await asyncio.sleep(15.0)
        state, reason, way_out = first.described()
        assert (state, way_out) == ("waiting", NO_HOLDER) and reason.startswith("no holder of stage 2 of 2 is in reach, last seen"), (
            "within 15 s"
        )
        steps = first.trainer.steps
        await asyncio.sleep(400.0)
        assert first.trainer.steps == steps
        state, reason, way_out = first.described()
        assert (state, way_out) == ("waiting", NO_LINE) and reason.startswith("no other peer is in reach"), "it cannot tell by itself"
        last.start()
        await run.until(lambda: first.trainer.steps > steps + 2, 70.0)
        await asyncio.sleep(6.0)
        assert first.described()[0] == "training"

    play(StagedRun(tmp_path, 2, 2), story)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_leave_ends_before_the_supervisor_kills_it_though_hops_are_under_way(stage: int, tmp_path: Path) -> None:
    """The last stage takes a minute for each hop, so none comes back; the other holder of the stage gets them."""

    async def story(run: StagedRun) -> None:
        loop = asyncio.get_running_loop()
        for last in run.of(2):
            last.trainer.service_s = 60.0
        leaving = run.of(stage)[0]
        await run.until(lambda: any(hop.state is HopState.AWAY or stage == 2 for hop in leaving.pipeline.carrier.hops.values()))
        began_s, neighbours = loop.time(), [holder for holder in run.holders if holder is not leaving]
        leaving.peer.stop()
        await run.until(lambda: leaving.has_ended, LEAVE_S[NODE])
        assert loop.time() - began_s < LEAVE_S[NODE] - 0.5
        assert not leaving.pipeline.lanes and not leaving.pipeline.carrier.hops
        assert not any(lane.lane.partner == leaving.peer_id for holder in neighbours for lane in holder.pipeline.lanes.values())

    play(StagedRun(tmp_path, 3, 6), story)


def test_a_leave_without_hops_takes_no_time(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (first,), (last,) = run.of(0), run.of(1)
        await run.until(lambda: first.trainer.steps >= 2)
        began_s = asyncio.get_running_loop().time()
        last.peer.stop()
        await run.until(lambda: last.has_ended, 3.0)
        declined = first.status.hops.get("outcomes", {}).get("passed_over", 0)
        assert asyncio.get_running_loop().time() - began_s < 2.0 and declined <= IN_BATCH

    play(StagedRun(tmp_path, 2, 2), story)


def test_of_two_that_join_an_empty_stage_at_once_one_begins_it(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        newcomers = [run.add(fits=(1,)), run.add(fits=(1,))]
        for holder in newcomers:
            holder.start()
        await run.until(lambda: any(holder.is_training for holder in newcomers), 30.0)
        await run.until(lambda: run.of(0)[0].trainer.steps >= 3, 30.0)

    play(StagedRun(tmp_path, 2, 1), story)


def test_a_stage_that_is_only_claimed_is_begun_by_its_first_holder(tmp_path: Path) -> None:
    """The claim is signed by a member that nobody reaches. A real holder that comes back would be waited for as long."""

    async def story(run: StagedRun) -> None:
        (first,) = run.holders
        claimant, expires_s = Identity((3).to_bytes(4, "little") * 8), int(run.network.now_s()) + 90
        claim = MemberRecord(run.manifest.run_id, claimant.peer_id, ("/ip4/192.0.2.66/tcp/1",), 50, False, 1, expires_s, stage=2)
        last = run.add(fits=(1,)).start()
        last.peer.book.learn(claim.signed(claimant), asyncio.get_running_loop().time())
        await asyncio.sleep(FOUND_S - 10.0)
        assert last.trainer.stage == 1 and not last.is_training
        await run.until(lambda: last.is_training, 100.0)
        await run.until(lambda: first.trainer.steps >= 3, 30.0)

    play(StagedRun(tmp_path, 2, 1), story)


def test_the_only_holder_of_a_stage_is_warned(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        await asyncio.sleep(65.0)
        assert all("with this peer's disk the stage would be lost" in holder.status.warnings[0] for holder in run.holders)
        run.add().start()
        await run.until(lambda: run.holders[2].trainer.stage is not None)
        (shared,) = [holder for holder in run.of(run.holders[2].trainer.stage) if holder is not run.holders[2]]
        await run.until(lambda: not shared.status.warnings, 30.0)

    play(StagedRun(tmp_path, 2, 2), story)


def test_a_hop_of_a_wrong_size_never_leaves_its_holder(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (first,), (last,) = run.of(0), run.of(1)
        await run.until(lambda: last.trainer.steps >= 2)
        first.trainer.wrong_bytes = 1
        await asyncio.sleep(5.0)
        added = sum(last.trainer.added.values())
        await asyncio.sleep(5.0)
        assert sum(last.trainer.added.values()) == added and last.pipeline.lanes, "nobody is to blame on the line"
        assert not last.peer.is_banned(first.peer_id)

    play(StagedRun(tmp_path, 2, 2), story)


def test_a_disk_that_fills_up_with_the_last_bytes_of_a_hop_costs_that_hop_only(tmp_path: Path) -> None:
    """The request to the trainer goes out with the last chunk, and its reply comes after the hop is over."""

    async def story(run: StagedRun) -> None:
        last = run.of(1)[0]
        await run.until(lambda: last.trainer.steps >= 2)
        num_late = len(last.trainer.late)
        for _ in range(100_000):
            begun = [path for path in last.payloads.path("").glob("hop-*") if HopFile.PARTNER_FORWARD.value in path.name]
            if half := [path for path in begun if path.stat().st_size < VALUE_BYTES]:
                half[0].unlink()
                half[0].symlink_to("/dev/full")
                break
            await asyncio.sleep(0.001)
        await run.until(lambda: len(last.trainer.late) > num_late, 5.0)
        steps = last.trainer.steps
        await run.until(lambda: last.trainer.steps > steps + 3, 20.0)

    play(StagedRun(tmp_path, 2, 2), story)


def test_a_lane_that_is_drawn_anew_ends_with_the_last_byte_of_its_last_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "DOWN_LANES", 1)
    monkeypatch.setattr(carrying, "REDRAW_S", 5.0)
    run = StagedRun(tmp_path, 2, 5)
    for holder, stage in zip(run.holders, (0, 0, 1, 1, 1), strict=True):
        holder.fits = (stage,)

    async def story(run: StagedRun) -> None:
        for holder in run.holders:
            line = run.network.peers[holder.peer_id].line
            line.link = replace(line.link, bytes_per_s=1e6)  # an answer takes a third of a second
        driver, seen = run.of(0)[0], set[int]()
        for _ in range(60):
            await asyncio.sleep(1.0)
            seen |= driver.pipeline.lanes.keys()
        assert len(seen) > 8, "no lane was drawn anew"
        assert driver.status.hops["repeated"] == 0, "an answer that was coming was thrown away"

    play(run, story)


def test_a_holder_that_falls_silent_is_replaced(tmp_path: Path) -> None:
    """It takes hops and never answers: patience, then another holder, and its own calls are refused for a while."""

    async def story(run: StagedRun) -> None:
        await run.until(lambda: all(holder.trainer.steps >= 3 for holder in run.holders))
        silent, other = run.of(1)
        silent.trainer.service_s = 1e6
        await asyncio.sleep(15.0)
        before = {driver.peer_id: driver.trainer.steps for driver in run.of(0)}
        await run.until(lambda: all(driver.trainer.steps > before[driver.peer_id] + 5 for driver in run.of(0)), 30.0)
        assert other.trainer.steps > silent.trainer.steps

    play(StagedRun(tmp_path, 2, 4), story)


def test_the_clock_of_one_neighbour_does_not_hide_those_of_others_for_longer_than_a_step(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (first,) = run.of(0)
        await run.until(lambda: first.trainer.steps >= 2)
        carrying, (open_lane,) = first.carrying, first.pipeline.lanes.values()
        far = carrying.lifecycle.global_step + carrying.membership.terms.max_clock_gap_steps
        carrying.on_clock(open_lane, far + BATCHES_AWAY)
        assert first.trainer.followed[-1] == far
        await run.until(lambda: carrying.lifecycle.global_step >= 4)
        await asyncio.sleep(LOOK_S)
        near = carrying.lifecycle.global_step + 3
        carrying.on_clock(open_lane, near + BATCHES_AWAY)
        assert first.trainer.followed[-1] == near

    play(StagedRun(tmp_path, 2, 2), story)


def test_a_run_that_is_over_ends_its_lanes(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        await run.until(lambda: all(holder.trainer.steps >= 10 for holder in run.holders))
        await run.until(lambda: not any(holder.pipeline.lanes for holder in run.holders), 10.0)
        await asyncio.sleep(3.0)  # for what the trainers have in hand
        for holder in run.holders:
            assert holder.pipeline.carrier.is_quiet and not list(holder.payloads.path("").glob("hop-*"))

    play(StagedRun(tmp_path, 2, 2, total_steps=10), story)


def test_a_peer_that_leaves_answers_what_is_under_way(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        await run.until(lambda: all(holder.trainer.steps >= 3 for holder in run.holders))
        (last,) = run.of(1)
        last.peer.stop()
        await run.until(lambda: not last.pipeline.lanes, 10.0)
        assert last.pipeline.carrier.is_quiet
        assert run.of(0)[0].status.hops["outcomes"].get("passed_over", 0) == 0

    play(StagedRun(tmp_path, 2, 2), story)


def test_two_batches_are_the_most_that_is_under_way(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        most = 0
        for _ in range(200):
            await asyncio.sleep(0.1)
            most = max(most, *(len(holder.pipeline.carrier.hops) for holder in run.holders))
        assert 2 <= most <= 2 * IN_BATCH

    play(StagedRun(tmp_path, 3, 3), story)
