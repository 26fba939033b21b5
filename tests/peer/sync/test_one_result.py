"""One result for all, the same bits: a peer that refuses it, judges it for long, is restarted, or comes late ends with it too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from gossamer.peer.link import messages
from gossamer.peer.node.final_averaging import WAIT_S
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.peer.sync.result_agreement import LINGER_S
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

ENDING = tiny_manifest(run={"total_steps": 60})
WITHIN_S = 90.0


async def in_order(swarm: Swarm, num_peers: int) -> list[Peer]:
    """Start peers; return them in the order in which they write a result down."""
    peers = swarm.start(num_peers)
    await swarm.until(lambda: all(peer.node for peer in peers))
    place = SybilGroups(peers[0].book, swarm.terms).writing_place
    return sorted(peers, key=lambda peer: place(peer.peer_id, None, 0))


def dislike(peer: Peer, monkeypatch: pytest.MonkeyPatch, *, after_s: float = 0.0, num_splits: int = 99) -> None:
    """Have a peer's trainer judge results that are not agreed for so long; until so many have been given up, it refuses them.

    A trainer with unlike text does so. `num_splits=0`: it only judges slowly.
    """
    judge = peer.link.request

    async def request(request: messages.AnsweredRequest) -> messages.Reply:
        if not isinstance(request, messages.Adopt) or request.is_agreed:
            return await judge(request)
        await asyncio.sleep(after_s)
        refuses = request.num_splits < num_splits
        return messages.Adopted(request.name, False, "its held-out loss is higher") if refuses else await judge(request)

    monkeypatch.setattr(peer.link, "request", request)


async def all_end_alike(swarm: Swarm, peers: list[Peer]) -> None:
    await swarm.until(lambda: all(peer.is_done for peer in peers), within_s=WITHIN_S)
    assert all(torch.equal(peer.fast, peers[0].fast) for peer in peers), "two results"


def test_two_peers_that_refuse_the_first_result_agree_on_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(swarm: Swarm) -> None:
        peers = await in_order(swarm, 2)
        for peer in peers:
            dislike(peer, monkeypatch, after_s=1.0, num_splits=1)  # meanwhile it has all pieces, which looks as if it had taken it
        await all_end_alike(swarm, peers)

    play(Swarm(tmp_path, manifest=ENDING), story)


def test_one_that_refuses_the_result_takes_it_once_the_others_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(swarm: Swarm) -> None:
        writer, *others, last = await in_order(swarm, 4)
        for peer in others:
            dislike(peer, monkeypatch, after_s=1.0, num_splits=0)
        dislike(last, monkeypatch, after_s=4.0)  # when it begins to judge, only the writer has it
        await all_end_alike(swarm, [writer, *others, last])

    play(Swarm(tmp_path, manifest=ENDING), story)


def test_the_writer_stays_while_the_only_other_peer_judges_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(swarm: Swarm) -> None:
        writer, judge = await in_order(swarm, 2)
        dislike(judge, monkeypatch, after_s=3 * LINGER_S, num_splits=1)
        await swarm.until(lambda: judge.node.source.coming is not None, within_s=WITHIN_S)
        await asyncio.sleep(2 * LINGER_S)
        assert not writer.is_done
        await all_end_alike(swarm, [writer, judge])

    play(Swarm(tmp_path, manifest=ENDING), story)


def test_one_that_is_killed_over_an_agreed_result_ends_with_it_when_all_others_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(swarm: Swarm) -> None:
        *others, slow = await in_order(swarm, 4)
        slow.save()
        dislike(slow, monkeypatch, after_s=3 * LINGER_S)
        await swarm.until(lambda: all(peer.is_done for peer in others), within_s=WITHIN_S)
        assert slow.node.source.result is None and slow.node.source.agreed
        for peer in others:
            peer.kill()
        slow.kill()
        slow.start()
        await all_end_alike(swarm, [*others, slow])

    play(Swarm(tmp_path, manifest=ENDING), story)


def test_the_writer_is_killed_before_it_leaves_and_ends_with_its_result_when_all_others_have_left(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        writer, *others = await in_order(swarm, 3)
        writer.trainer.on_save = writer.save
        await swarm.until(lambda: bool(writer.node.source.agreed), within_s=WITHIN_S)
        writer.kill()
        await swarm.until(lambda: all(peer.is_done for peer in others), within_s=WITHIN_S)
        for peer in others:
            peer.kill()
        writer.start()
        await all_end_alike(swarm, [writer, *others])

    play(Swarm(tmp_path, manifest=ENDING), story)


def test_one_that_trains_on_against_the_result_takes_it_when_the_other_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(swarm: Swarm) -> None:
        quick, late = swarm.start(2)
        await swarm.until(lambda: late.num_completed and quick.global_step > 20)
        dislike(late, monkeypatch, num_splits=1)
        late.trainer.frozen = True
        await swarm.until(lambda: quick.is_done, within_s=WAIT_S + WITHIN_S)
        assert not late.lifecycle.finished
        quick.kill()
        late.trainer.frozen = False
        await all_end_alike(swarm, [quick, late])

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 120})), story)
