"""The end of a staged run: who ends when, and who is waited for. Real nodes, trainers that compute nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gossamer.peer.node import stage_end
from gossamer.peer.node.stage_end import GONE_S, OVER_S
from gossamer.peer.swarm.presence import ANNOUNCE_S, LOOK_S
from gossamer.peer.sync import result_agreement
from tests.swarm.holders import Holder, StagedRun, paced, play

END_WAIT_S = 300.0  # in these stories


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_end, "END_WAIT_S", END_WAIT_S)
    monkeypatch.setattr(result_agreement, "PAUSE_S", 3.0)  # these trainers have no result to agree on


def test_the_last_stage_serves_drivers_until_each_has_made_all_steps(tmp_path: Path) -> None:
    """One driver takes three times as long."""

    async def story(run: StagedRun) -> None:
        loop = asyncio.get_running_loop()
        slow = run.add(service_s=0.6, fits=(0,)).start()
        (quick, _), (last,) = run.of(0) + [slow], run.of(1)
        await run.until(lambda: quick.trainer.steps == 30, 100.0)
        await run.until(lambda: not quick.pipeline.lanes, 5.0)
        assert slow.trainer.global_step < 28 and not last.trainer.is_over
        await run.until(lambda: slow.trainer.global_step == 30, 300.0)
        ended_s = loop.time()
        await run.until(lambda: last.trainer.is_over, 10.0)
        assert last.trainer.global_step == 30 and loop.time() - ended_s < 6.0

    play(StagedRun(tmp_path, 2, 2, total_steps=30), story)


async def last_stage_at_the_end(run: StagedRun) -> tuple[Holder, Holder]:
    """Return a driver that goes on for ever, and the holder of the last stage once only the last of 20 steps is left to it."""
    (first,), (last,) = run.of(0), run.of(1)
    await run.until(lambda: first.trainer.steps == 12)
    first.trainer.total_steps = 1_000_000
    await run.until(lambda: last.trainer.global_step == 19)
    return first, last


def test_a_driver_without_an_end_holds_the_last_stage_up_for_a_limited_time(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        first, last = await last_stage_at_the_end(run)
        await asyncio.sleep(END_WAIT_S - 10.0)
        assert not last.trainer.is_over and first.trainer.steps > 60
        await run.until(lambda: last.trainer.is_over, 20.0)

    play(paced(tmp_path, 2, 2, total_steps=20), story)


def test_one_of_three_drivers_that_claims_an_end_does_not_end_the_last_stage(tmp_path: Path) -> None:
    """Else one member ends the run of all, two hundred steps too early where these take longer than a stage serves at its end."""

    async def story(run: StagedRun) -> None:
        run.of(0)[0].trainer.service_s = 2.0
        for _ in range(2):
            run.add(service_s=2.0, fits=(0,)).start()
        await run.until(lambda: len(run.of(0)) == 3 and all(driver.trainer.steps >= 2 for driver in run.of(0)), 300.0)
        (*honest, claims), (last,) = run.of(0), run.of(1)
        claims.trainer.end()
        await run.until(lambda: last.peer.book.get(claims.peer_id).finished)
        await asyncio.sleep(END_WAIT_S + 60.0)
        assert not last.trainer.is_over and last.trainer.global_step < 150
        steps = [driver.trainer.steps for driver in honest]
        await run.until(lambda: all(driver.trainer.steps > before for driver, before in zip(honest, steps, strict=True)), 200.0)

    play(paced(tmp_path, 2, 2, total_steps=200), story)


def test_a_pause_at_the_end_of_the_run_is_no_time_of_waiting(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        _, last = await last_stage_at_the_end(run)
        last.peer.lifecycle.pause()
        await asyncio.sleep(END_WAIT_S)
        last.peer.lifecycle.resume()
        await asyncio.sleep(30.0)
        assert not last.trainer.is_over

    play(paced(tmp_path, 2, 2, total_steps=20), story)


def test_a_pause_in_the_last_steps_does_not_count_as_a_long_step(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (first,), (last,) = run.of(0), run.of(1)
        await run.until(lambda: first.trainer.steps == 12)
        first.trainer.total_steps = 1_000_000
        await run.until(lambda: last.trainer.global_step >= 16)
        last.peer.lifecycle.pause()
        await asyncio.sleep(2 * END_WAIT_S)
        last.peer.lifecycle.resume()
        await run.until(lambda: last.trainer.global_step == 19)
        await run.until(lambda: last.trainer.is_over, END_WAIT_S + 20.0)

    play(paced(tmp_path, 2, 2, total_steps=20), story)


@pytest.mark.parametrize("how", ["paused", "killed", "cut off"])
def test_a_driver_that_is_away_at_the_end_holds_nobody_up_for_ever(how: str, tmp_path: Path) -> None:
    """Of two drivers one ends. The holders of the last stage have made fewer steps, and get no more batches."""

    async def story(run: StagedRun) -> None:
        ends, away = run.of(0)
        await run.until(lambda: min(driver.trainer.global_step for driver in run.of(0)) >= 25, 200.0)
        match how:
            case "paused":
                away.peer.lifecycle.pause()
            case "killed":
                away.kill()
            case _:
                run.network.partition([away.peer_id])
        await run.until(lambda: ends.trainer.global_step == 40, 300.0)
        assert not any(last.trainer.is_over for last in run.of(1))
        if how == "paused":
            await asyncio.sleep(2 * GONE_S)
            assert not any(last.trainer.is_over for last in run.of(1))
        await run.until(lambda: all(last.trainer.is_over for last in run.of(1)), END_WAIT_S if how == "paused" else GONE_S + 40.0)

    play(paced(tmp_path, 2, 4, total_steps=40), story)


async def until_one_driver_has_ended(run: StagedRun) -> tuple[Holder, Holder]:
    """Return a driver that needs a few more steps, and the holder of the last stage, two seconds after the other driver's end."""
    run.add(service_s=0.6, fits=(0,)).start()
    await run.until(lambda: len(run.of(0)) == 2, 30.0)
    (quick, slow), (last,) = run.of(0), run.of(1)
    await run.until(lambda: quick.trainer.steps == 30, 100.0)
    await asyncio.sleep(2.0)
    assert slow.trainer.global_step < 30
    return slow, last


def test_a_holder_whose_own_line_is_down_at_the_end_waits_for_a_driver_that_it_cannot_reach(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        slow, last = await until_one_driver_has_ended(run)
        run.network.partition([last.peer_id])
        await asyncio.sleep(3 * GONE_S)
        assert not last.trainer.is_over
        run.network.partition()
        await run.until(lambda: slow.trainer.global_step == 30, 200.0)
        await run.until(lambda: last.trainer.is_over, 20.0)

    play(StagedRun(tmp_path, 2, 2, total_steps=30), story)


def test_a_driver_that_starts_at_the_end_is_waited_for(tmp_path: Path) -> None:
    """Its node is there before its trainer, and announces that. Its own calls do not get through."""

    async def story(run: StagedRun) -> None:
        loop = asyncio.get_running_loop()
        slow, last = await until_one_driver_has_ended(run)
        slow.kill()
        slow.start().trainer.built_s = 1e6
        run.network.refuse(last.peer_id)
        await asyncio.sleep(2 * GONE_S)
        for _ in range(60):
            await asyncio.sleep(1.0)
            assert loop.time() - last.peer.book.get(slow.peer_id).seen_s <= ANNOUNCE_S + LOOK_S[1] + 5.0
        assert not last.trainer.is_over

    play(StagedRun(tmp_path, 2, 2, total_steps=30), story)


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("first_to_end", [0, 1])
def test_who_can_carry_no_hop_any_more_ends_with_the_neighbouring_stage(first_to_end: int, leaves: bool, tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (ends,), (other,) = run.of(first_to_end), run.of(1 - first_to_end)
        await run.until(lambda: all(holder.trainer.steps >= 6 for holder in run.holders))
        ends.trainer.end()
        await asyncio.sleep(15.0)
        if leaves:
            ends.peer.stop()
        await asyncio.sleep(OVER_S - 20.0)
        assert not other.trainer.is_over
        await run.until(lambda: other.trainer.is_over, 30.0)
        assert other.trainer.followed[-1] == 12

    play(paced(tmp_path, 2, 2, total_steps=12), story)


async def nobody_ends(run: StagedRun) -> None:
    """Wait for longer than an end takes: nobody ends with the neighbouring stage."""
    await asyncio.sleep(3 * OVER_S)
    assert not any(holder.trainer.is_over for holder in run.holders)


def test_nobody_ends_with_a_neighbour_that_claims_an_end_in_the_first_half_of_the_run(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        (ends,) = run.of(1)
        await run.until(lambda: all(holder.trainer.steps >= 3 for holder in run.holders))
        ends.trainer.end()
        await nobody_ends(run)

    play(paced(tmp_path, 2, 2, total_steps=100), story)


def test_nobody_ends_with_a_stranger(tmp_path: Path) -> None:
    """The only partner has left, and a holder that has carried no hop has reached the end of the run."""

    async def story(run: StagedRun) -> None:
        (first,), (last,) = run.of(0), run.of(1)
        await run.until(lambda: all(holder.trainer.steps >= 8 for holder in run.holders))
        stranger = run.add(fits=(1,)).start()
        stranger.trainer.end()
        await run.until(lambda: first.peer.book.get(stranger.peer_id).finished)
        last.peer.stop()
        await run.until(lambda: not first.pipeline.lanes, 10.0)
        last.kill()
        first.peer.book.note_leaving(last.peer_id, asyncio.get_running_loop().time())
        await nobody_ends(run)

    play(paced(tmp_path, 2, 2, total_steps=16), story)


def test_nobody_ends_while_a_partner_of_the_neighbouring_stage_is_paused(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        ends, away = run.of(1)
        await run.until(lambda: all(holder.trainer.steps >= 8 for holder in run.holders))
        ends.trainer.end()
        away.peer.lifecycle.pause()
        await run.until(lambda: all(holder.peer.book.get(away.peer_id).paused for holder in run.of(0)), 120.0)
        await nobody_ends(run)

    play(paced(tmp_path, 2, 4, total_steps=16), story)


def test_nobody_ends_while_one_holder_of_the_neighbouring_stage_trains(tmp_path: Path) -> None:
    async def story(run: StagedRun) -> None:
        run.add(fits=(0,)).start()
        await run.until(lambda: len(run.of(0)) == 2 and all(holder.trainer.steps >= 2 for holder in run.holders))
        ends = run.of(0)[0]
        ends.trainer.end()
        await asyncio.sleep(3 * OVER_S)
        (other,) = run.of(1)
        assert not other.trainer.is_over and run.of(0)[1].trainer.steps > 8

    play(paced(tmp_path, 2, 2), story)
