"""StateSync: a founder begins by itself, and who has fallen behind takes over newer weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from gossamer.peer.meeting.commands import Finish
from gossamer.peer.meeting.interface import MeetingOutcome
from gossamer.peer.sync.decision import STEP_BACK_S, wanted
from gossamer.peer.sync.state_sync import LOOK_S, MEASURED_S, OUTCAST, StateSync
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.identity import Identity, PeerId
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play, started

QUIET = tiny_manifest(run={"total_steps": 100_000})
TOO_FAR = Finish(MeetingOutcome.REFUSED, "too far", RefusalCode.STEP_TOO_FAR)
GATE = Finish(MeetingOutcome.REFUSED, "gate", RefusalCode.GATE)


def test_a_founder_begins_once_its_company_is_there(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        founder = swarm.add(waits_for_start=True, wait_for_peers=1).start()
        await asyncio.sleep(30.0)
        assert not founder.trainer.started and "waiting for peers" in founder.reported[-1].reason
        swarm.add(waits_for_start=True, is_founder=False).start()
        await swarm.until(lambda: all(peer.trainer.started for peer in swarm.peers), within_s=30.0)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_peer_without_initial_weights_fetches_them(tmp_path: Path) -> None:
    """Even the run's own host, started again without them, and however little the others have trained."""

    async def story(swarm: Swarm) -> None:
        [resident] = swarm.start(1)
        await swarm.until(lambda: resident.global_step >= 1)
        newcomers = [swarm.add(waits_for_start=True, is_founder=is_founder, has_start=False).start() for is_founder in (False, True)]
        await swarm.until(lambda: all(peer.transfers for peer in newcomers), within_s=60.0)
        await swarm.until(lambda: all(peer.trainer.started for peer in newcomers), within_s=10.0)

    weights = {"weights": "ab" * 32}  # they do not follow from the seed
    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 100_000}, model=weights)), story)


def test_only_a_peer_behind_the_runs_gap_takes_over_weights(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        far, near = swarm.manifest.outer.max_clock_gap_steps + 5, 20
        residents = swarm.start(2)

        async def halt_at(steps: int) -> None:
            for resident in residents:
                resident.trainer.frozen = False
            await swarm.until(lambda: min(resident.global_step for resident in residents) >= steps)
            for resident in residents:
                resident.trainer.frozen = True

        await halt_at(near)
        straggler = swarm.add()
        straggler.trainer.frozen = True
        straggler.start()
        await asyncio.sleep(60.0)
        assert straggler.global_step == 0, "its own weights were good enough"
        await halt_at(far)
        await swarm.until(lambda: straggler.transfers, within_s=60.0)
        assert straggler.global_step > far - 20 and any(torch.allclose(straggler.slow, resident.slow, atol=0.05) for resident in residents)

    play(Swarm(tmp_path, manifest=QUIET), story)


def somebody(number: int) -> PeerId:
    return Identity(number.to_bytes(2, "little") * 16).peer_id


def know(peer: Peer, num_others: int, global_step: int) -> list[PeerId]:
    """Have a peer know so many others, all at this clock."""
    others = [somebody(number) for number in range(100, 100 + num_others)]
    for other in others:
        peer.book.note_call(other, asyncio.get_running_loop().time(), global_step)
    return others


def report(sync: StateSync, partners: list[PeerId], finish: Finish, num: int = OUTCAST, *, initiated: bool = True) -> None:
    for number in range(num):
        sync.on_meeting(partners[number % len(partners)], finish, initiated=initiated)


def test_a_row_of_refusals_is_forgotten_at_a_meeting_that_counts(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)
        await started()
        sync, others = peer.node.state_sync, know(peer, 1, 1000)
        report(sync, others, TOO_FAR, OUTCAST - 1)
        assert wanted(sync.view()) is None
        report(sync, others, Finish(MeetingOutcome.COMPLETED, ""), 1)
        report(sync, others, TOO_FAR, 1)
        assert wanted(sync.view()) is None
        report(sync, others, TOO_FAR, OUTCAST - 1)
        target = wanted(sync.view())
        assert target is not None and peer.global_step < target.earliest_step <= 1000, "only a source that is further than we are"
        assert target.latest_step == 1000 + 60

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_refusals_in_calls_to_us_trigger_no_transfer(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)
        await started()
        sync, others = peer.node.state_sync, know(peer, 5, 20)
        for finish in (TOO_FAR, GATE):
            report(sync, others, finish, 100, initiated=False)
        assert wanted(sync.view()) is None
        report(sync, others, GATE)
        assert wanted(sync.view()) is not None, "where we called, it counts"

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_one_far_ahead_keeps_its_weights_and_sets_its_clock_back(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)
        await asyncio.sleep(STEP_BACK_S + 1.0)
        peer.trainer.frozen = True
        sync, others = peer.node.state_sync, know(peer, 5, 20)
        for other in others:
            peer.book.get(other).was_met = True
        before = peer.slow
        for num_reports, later_s, has_moved in ((OUTCAST - 1, STEP_BACK_S, False), (1, 0.0, True)):
            report(sync, others, TOO_FAR, num_reports)
            assert wanted(sync.view()) is None
            await asyncio.sleep(later_s + LOOK_S + 8.0)  # dead peers are asked for their clocks
            assert (peer.global_step == 20 + 45) == has_moved
        assert torch.equal(peer.slow, before)


def test_the_time_of_a_pause_counts_for_how_far_partners_may_have_come(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)
        await swarm.until(lambda: peer.global_step >= 200)
        (other,) = know(peer, 1, 200)
        peer.book.get(other).was_met = True
        peer.lifecycle.pause()
        peer.save()
        peer.kill_trainer()
        await asyncio.sleep(500.0)
        peer.book.note_call(other, asyncio.get_running_loop().time(), 1200, finished=True)
        peer.lifecycle.resume()
        peer.restart_trainer()
        await swarm.until(lambda: peer.lifecycle.may_meet)
        await asyncio.sleep(2.0)
        assert peer.node.state_sync._is_ending(), "the run may have ended meanwhile"

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 1200})), story)


def test_the_step_without_the_absence_follows_from_our_own_rate_alone(tmp_path: Path) -> None:
    """The peer makes four steps a second. A global step that it takes over from a partner after an absence does not raise that rate."""

    async def story(swarm: Swarm) -> None:
        peer, partner = swarm.start(2)

        async def missed_steps(away_s: float) -> float:
            peer.lifecycle.pause()
            peer.save()
            peer.kill_trainer()
            await asyncio.sleep(away_s)
            peer.lifecycle.resume()
            peer.restart_trainer()
            await swarm.until(lambda: peer.lifecycle.may_meet)
            view = peer.node.state_sync.view()
            return view.unpaused_steps - view.own_global_step

        await swarm.until(lambda: peer.global_step >= 200)
        assert await missed_steps(100.0) == pytest.approx(500, rel=0.1), "four a second, and a quarter more"
        await swarm.until(lambda: peer.global_step > partner.global_step - 30, within_s=60.0)
        await asyncio.sleep(MEASURED_S)
        assert await missed_steps(100.0) == pytest.approx(500, rel=0.1)
        for _ in range(3):
            assert await missed_steps(2.0) == pytest.approx(10, abs=6), "a short absence gives a partner few steps, however many there are"

    play(Swarm(tmp_path, manifest=QUIET), story)


@pytest.mark.parametrize("restarts", [False, True])
def test_steps_followed_in_meetings_after_an_absence_are_no_rate_of_ours(tmp_path: Path, restarts: bool) -> None:
    """Four own steps a second. A process that is started again knows no rate until it has measured one."""

    async def story(swarm: Swarm) -> None:
        peer, partner = swarm.start(2)
        await swarm.until(lambda: peer.global_step >= 200)
        partner.kill()
        peer.save()
        if restarts:
            peer.home.peers.write_bytes(peer.book.to_bytes(asyncio.get_running_loop().time(), peer.local_s()))
            peer.kill()
            await asyncio.sleep(1000.0)
            peer.start()
            await started()
        else:
            peer.lifecycle.pause()
            peer.kill_trainer()
            await asyncio.sleep(1000.0)
            peer.lifecycle.resume()
            peer.restart_trainer()
        await swarm.until(lambda: peer.lifecycle.may_meet)
        returned_steps, returned_s = peer.global_step, asyncio.get_running_loop().time()

        def granted_steps() -> int:
            return peer.node.state_sync.view().unpaused_steps - returned_steps

        async def follow() -> None:
            peer.trainer.replica.set_global_step(peer.global_step + swarm.terms.max_clock_gap_steps - 10)
            await asyncio.sleep(3.0)

        await follow()
        assert granted_steps() == pytest.approx(0 if restarts else 5000, rel=0.05, abs=10)
        while asyncio.get_running_loop().time() < returned_s + MEASURED_S + 5.0:
            await follow()
        assert granted_steps() == pytest.approx(5000, rel=0.1)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_absences_without_training_in_between_count_as_one(tmp_path: Path) -> None:
    """As when a setting has the node start again in a pause."""

    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)

        async def be_paused(seconds: float) -> float:
            peer.lifecycle.pause()
            await asyncio.sleep(seconds)
            peer.lifecycle.resume()
            await asyncio.sleep(1.0)
            return peer.node.state_sync.away_s

        await swarm.until(lambda: peer.lifecycle.may_meet)
        await asyncio.sleep(LOOK_S)
        peer.kill_trainer()
        assert await be_paused(100.0) == pytest.approx(100.0, abs=0.1)
        assert await be_paused(50.0) == pytest.approx(150.0, abs=0.1)
        peer.restart_trainer()
        await swarm.until(lambda: peer.lifecycle.may_meet)
        await asyncio.sleep(2 * LOOK_S)
        peer.kill_trainer()
        assert await be_paused(30.0) == pytest.approx(30.0, abs=0.1)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_the_time_before_the_others_came_back_does_not_count_for_a_step_back(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)
        await asyncio.sleep(10 * STEP_BACK_S)
        sync, others, before = peer.node.state_sync, know(peer, 5, 20), peer.global_step
        for other in others:
            peer.book.get(other).was_met = True
        report(sync, others, TOO_FAR, OUTCAST)
        await asyncio.sleep(STEP_BACK_S - LOOK_S)
        assert peer.global_step > before

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_the_time_of_a_partners_pause_does_not_count_for_a_step_back(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)
        await asyncio.sleep(10 * STEP_BACK_S)
        sync, (other,) = peer.node.state_sync, know(peer, 1, 20)
        peer.book.get(other).was_met = True
        report(sync, [other], TOO_FAR, OUTCAST - 2)
        peer.book.get(other).paused = True
        await asyncio.sleep(2 * STEP_BACK_S)
        know(peer, 1, 20)
        peer.book.get(other).paused = False
        report(sync, [other], TOO_FAR, OUTCAST)
        assert sync.view().is_far and sync.view().refused_s < 1.0

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_partners_that_come_back_one_after_another_do_not_make_up_a_minute(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)
        await asyncio.sleep(10 * STEP_BACK_S)
        peer.trainer.frozen = True
        sync, others = peer.node.state_sync, know(peer, 5, 20)
        for other in others:
            peer.book.get(other).was_met = True
        report(sync, others[:2], TOO_FAR, OUTCAST)
        await asyncio.sleep(STEP_BACK_S)
        report(sync, others[2:], TOO_FAR, OUTCAST)
        assert sync.view().is_far and sync.view().refused_s < 1.0, "only two of five have refused it for a minute"

    play(Swarm(tmp_path, manifest=QUIET), story)


@pytest.mark.parametrize("finish", [TOO_FAR, GATE])
def test_two_malicious_peers_among_many_trigger_no_transfer(tmp_path: Path, finish: Finish) -> None:
    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)
        await started()
        sync, others = peer.node.state_sync, know(peer, 5, 20)
        for attacker in others[:2]:
            peer.book.note_call(attacker, asyncio.get_running_loop().time(), 50_000)
        report(sync, others[:2], finish, 100)
        assert wanted(sync.view()) is None

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_clock_that_is_too_far_must_have_been_signed(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)
        await started()
        sync, others = peer.node.state_sync, know(peer, 4, peer.global_step + 10)
        report(sync, others, TOO_FAR, 100)
        assert wanted(sync.view()) is None

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_shut_out_at_many_gates_we_take_weights_of_about_our_time(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)
        await started()
        sync, others = peer.node.state_sync, know(peer, 4, 40)
        report(sync, others, GATE)
        target = wanted(sync.view())
        assert target is not None and target.earliest_step == peer.lifecycle.global_step + 1 and target.latest_step == 40 + 60

    play(Swarm(tmp_path, manifest=QUIET), story)
