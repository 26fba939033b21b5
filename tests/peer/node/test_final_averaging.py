"""The end of a run: all have the same weights, nobody is waited for long, and no death keeps the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.peer.machine.events import Event, ResultTaken
from gossamer.peer.node.final_averaging import WAIT_S, FinalAveraging
from gossamer.peer.node.node import CLOSE_S
from gossamer.peer.sync.result_agreement import LINGER_S, RANK_S
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.tasks import loop_s
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

SHORT = tiny_manifest(run={"total_steps": 20})


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    return Swarm(tmp_path, manifest=SHORT)


def spread(peers: list[Peer]) -> float:
    fast = torch.stack([peer.fast for peer in peers])
    return float((fast - fast.mean(0)).square().mean(0).sum().sqrt())


def results(peer: Peer) -> list[ResultTaken]:
    """Note from now on which results a peer takes."""
    taken: list[ResultTaken] = []
    apply_event = peer.on_event

    def on_event(event: Event) -> None:
        apply_event(event)
        if isinstance(event, ResultTaken):
            taken.append(event)

    peer.on_event = on_event  # type: ignore[method-assign]
    return taken


@pytest.mark.parametrize("num_peers", [2, 8])
async def test_all_end_with_the_same_weights_near_the_mean_within_seconds(tmp_path: Path, num_peers: int, swarm: Swarm) -> None:
    peers = [swarm.add(step_s=0.1) for _ in range(num_peers)]
    taken = [results(peer) for peer in peers]
    for peer in peers:
        peer.start()
    await swarm.until(lambda: all(peer.trainer.replica.phase is RunPhase.FINISH for peer in peers))
    ended_s = loop_s()
    before, mean = spread(peers), torch.stack([peer.fast for peer in peers]).mean(0)
    await swarm.until(lambda: all(peer.is_done for peer in peers))
    assert loop_s() - ended_s < 2 * RANK_S + 6.0
    assert spread(peers) == 0.0 and len({result[-1].name for result in taken}) == 1
    assert float((peers[0].fast - mean).norm()) < 2 * before, "what was in flight when the last one came to the end still counts"
    assert not any(list((tmp_path / f"peer-{number + 1}" / "downloads").glob("*")) for number in range(num_peers))


def test_a_bug_in_the_averaging_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: FinalAveraging, fragment: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(FinalAveraging, "_finish", broken)

    async def story(swarm: Swarm) -> None:
        peer = swarm.add().start()
        await swarm.until(lambda: peer.is_done, within_s=60.0)

    with pytest.raises(ExceptionGroup):
        play(Swarm(tmp_path, manifest=SHORT), story)


async def test_a_peer_without_partners_is_done_at_once(swarm: Swarm) -> None:
    peer = swarm.add().start()
    await swarm.until(lambda: peer.trainer.replica.phase is RunPhase.FINISH)
    await swarm.until(lambda: peer.is_done, within_s=5.0)
    assert not peer.meetings


async def test_one_that_is_far_behind_takes_the_result_and_is_not_waited_for(tmp_path: Path) -> None:
    async with Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 120})) as swarm:
        quick, other, slow = (swarm.add() for _ in range(3))
        slow.trainer.frozen = True
        for peer in (quick, other, slow):
            peer.start()
        await swarm.until(lambda: quick.lifecycle.finished and other.lifecycle.finished, within_s=60.0)
        began_s = loop_s()
        await swarm.until(lambda: quick.is_done and other.is_done, within_s=WAIT_S + LINGER_S + CLOSE_S)
        assert loop_s() - began_s < WAIT_S
        assert slow.trainer.replica.phase is RunPhase.FINISH and torch.equal(slow.fast, quick.fast)


async def test_one_that_comes_soon_is_waited_for_and_its_weights_count(tmp_path: Path) -> None:
    async with Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 120})) as swarm:
        quick, other, late = (swarm.add(step_s=step_s) for step_s in (0.1, 0.1, 0.13))
        for peer in (quick, other, late):
            peer.start()
        await swarm.until(lambda: quick.lifecycle.finished and other.lifecycle.finished, within_s=60.0)
        assert not late.lifecycle.finished
        await swarm.until(lambda: late.lifecycle.finished, within_s=WAIT_S)
        before = late.num_completed
        await swarm.until(lambda: all(peer.is_done for peer in swarm.peers), within_s=60.0)
        assert late.num_completed > before


async def test_one_that_never_answers_is_waited_for_only_so_long(swarm: Swarm) -> None:
    quick, dead = swarm.add(), swarm.add()
    dead.trainer.frozen = True
    for peer in (quick, dead):
        peer.start()
    await swarm.until(lambda: quick.global_step > 15)
    dead.kill()
    await swarm.until(lambda: quick.lifecycle.finished, within_s=60.0)
    began_s = loop_s()
    await swarm.until(lambda: quick.is_done, within_s=60.0)
    assert loop_s() - began_s < WAIT_S + LINGER_S


async def test_the_death_of_the_peer_that_writes_the_result_costs_seconds(swarm: Swarm) -> None:
    peers = sorted(swarm.start(4), key=lambda peer: peer.peer_id)
    await swarm.until(lambda: all(peer.lifecycle.finished for peer in peers))
    peers[0].kill()
    began_s = loop_s()
    await swarm.until(lambda: all(peer.is_done for peer in peers[1:]), within_s=60.0)
    assert loop_s() - began_s < 25.0
    assert spread(peers[1:]) == 0.0
