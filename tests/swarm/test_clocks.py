"""Schedule clocks: who is too far apart to meet finds the way back, and nobody is shut out for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})


def test_clocks_too_far_apart_are_refused_and_the_straggler_catches_up(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        residents = swarm.start(3)
        straggler = residents[2]
        await swarm.until(lambda: all(peer.num_completed >= 2 for peer in residents))
        straggler.save()
        straggler.kill()
        await asyncio.sleep(45.0)
        behind = residents[0].global_step - straggler.checkpoint.state["clock_steps"]
        assert behind > 60 + 30
        straggler.start()
        count, applied = straggler.num_completed, [peer.trainer.applied.total() for peer in residents[:2]]
        await swarm.until(lambda: straggler.global_step > residents[0].global_step - 30, within_s=30.0)
        assert straggler.num_completed == count, "it met somebody with old weights"
        await swarm.until(lambda: len(straggler.partners()) == 2 and straggler.num_completed >= count + 4)
        assert all(peer.trainer.applied.total() > before for peer, before in zip(residents, applied, strict=False))

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_peer_too_slow_for_the_others_clock_is_not_shut_out(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        fast = swarm.start(2, step_s=0.2)
        slow = swarm.add(step_s=2.0).start()
        await asyncio.sleep(70.0)
        for _ in range(3):
            count = slow.num_completed
            await swarm.until(lambda count=count: slow.num_completed >= count + 2, within_s=40.0)  # type: ignore[misc]
            assert slow.global_step > fast[0].global_step - 2 * 60

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_peer_alone_far_ahead_comes_back_to_the_others(tmp_path: Path) -> None:
    """All others came back with old checkpoints: half of the swarm is where the swarm is."""

    async def story(swarm: Swarm) -> None:
        peers = swarm.start(3)
        await swarm.until(lambda: all(peer.num_completed >= 2 for peer in peers))
        for peer in peers[1:]:
            peer.save()
            peer.kill()
        await asyncio.sleep(25.0)
        for peer in peers[1:]:
            peer.start()
        ahead = peers[0]
        assert ahead.global_step - peers[1].global_step > 60 + 30
        count = ahead.num_completed
        await swarm.until(lambda: ahead.num_completed >= count + 3, within_s=120.0)
        assert abs(ahead.global_step - peers[1].global_step) < 60

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_of_two_peers_the_one_behind_moves_and_they_do_not_change_places(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        a, b = swarm.start(2)
        await swarm.until(lambda: b.num_completed >= 2)
        b.save()
        b.kill()
        await asyncio.sleep(25.0)
        behind = a.global_step - b.checkpoint.state["clock_steps"] if b.checkpoint else 0
        assert behind > 60 + 30
        steps = a.global_step
        b.start()
        count = b.num_completed
        await swarm.until(lambda: b.num_completed >= count + 3, within_s=60.0)
        assert min(a.global_step, b.global_step) > steps

    play(Swarm(tmp_path, manifest=QUIET), story)


@pytest.mark.parametrize("step_s", [0.25, 0.23])
@pytest.mark.parametrize("restarts", [False, True])
def test_who_went_on_alone_with_worse_weights_gives_up_no_steps(tmp_path: Path, restarts: bool, step_s: float) -> None:
    """It trains on another text, so the others refuse its weights when they come back, and keep each other company.

    It may be as fast as the others, or a little faster.
    """

    async def story(swarm: Swarm) -> None:
        alone, *others = swarm.add(text=1, step_s=step_s).start(), *swarm.start(2)
        await swarm.until(lambda: all(peer.num_completed >= 2 for peer in swarm.peers))
        await asyncio.sleep(40.0)  # until their weights are good on their own text
        for peer in others:
            if not restarts:
                peer.lifecycle.pause()
            await peer.node.meetings.until_quiet()
            peer.save()
            peer.home.peers.write_bytes(peer.book.to_bytes(asyncio.get_running_loop().time(), peer.local_s()))
            _ = peer.kill() if restarts else peer.kill_trainer()
        await asyncio.sleep(60.0)
        for peer in others:
            if restarts:
                peer.start()
            else:
                peer.lifecycle.resume()
                peer.restart_trainer()
        steps, count, transfers = alone.global_step, alone.num_completed, [len(peer.transfers) for peer in others]
        assert steps - max(peer.global_step for peer in others) > 2 * 60
        await swarm.until(lambda: alone.num_completed >= count + 3, within_s=150.0)
        assert alone.status.given_up_steps == 0
        assert [len(peer.transfers) for peer in others] == transfers, "its weights were taken"

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_peer_that_pauses_again_before_it_has_caught_up_costs_its_partner_no_steps(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        a, b = swarm.start(2)
        await swarm.until(lambda: b.num_completed >= 2)
        b.save()
        b.kill()
        await asyncio.sleep(60.0)
        b.start()
        await swarm.until(lambda: a.outcomes()["refused"] >= 3, within_s=30.0)
        b.lifecycle.pause()
        b.kill_trainer()
        steps = a.global_step
        await asyncio.sleep(150.0)
        b.lifecycle.resume()
        b.restart_trainer()
        count = b.num_completed
        await swarm.until(lambda: b.num_completed >= count + 3, within_s=120.0)
        assert min(a.global_step, b.global_step) > steps

    play(Swarm(tmp_path, manifest=QUIET), story)
