"""The run's result: peers that fetch it share what they have; one that means no good is not taken."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.peer.link import messages
from gossamer.peer.swarm.membership import OwnCredential
from gossamer.peer.swarm.presence import Presence
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.peer.sync import pieces as files
from gossamer.peer.sync import result_agreement
from gossamer.peer.sync.client import FetchClient
from gossamer.peer.sync.pieces import Pieces, RunResult, fetch_hashes, to_bits
from gossamer.peer.sync.state_source import OF_RESULT, TAKING_S
from gossamer.protocol.errors import BadMessage, GossamerError, RefusalCode, Refused
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.memory.conversation import Link as Wire
from gossamer.protocol.messages.messages import Chunk, Contents, ContentsKind, FetchRequest, Part, Refusal, RunPhase
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import cancel, loop_s
from tests.swarm.mallory import MALLORY, nobody
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

PIECE = files.PIECE_BYTES


def an_attacker(swarm: Swarm, pause_s: float = 0.0) -> None:
    """Bring up one that has a result for everybody: sound numbers, no model. If it waits before each piece, its name is the smallest."""
    num_bytes = swarm.terms.state_bytes
    draws = torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(1)) * 0.3
    data = torch.cat((draws, torch.zeros(num_bytes // 4))).bfloat16().view(torch.int16).numpy().tobytes()
    result = RunResult.of(memoryview(data))
    while pause_s and result.name[0]:
        data = (int.from_bytes(data[:2], "little") + 1).to_bytes(2, "little") + data[2:]
        result = RunResult.of(memoryview(data))
    answers = {
        ContentsKind.RESULT: memoryview(data),
        ContentsKind.RESULT_HASHES: memoryview(result.hashes),
        ContentsKind.RESULT_PIECES: memoryview(result.held()),
        ContentsKind.RESULT_AGREED: memoryview(b""),
    }

    bring_up(swarm, lambda kind: (answers[kind], result.name), pause_s)


def bring_up(swarm: Swarm, answer: Callable[[ContentsKind], tuple[memoryview, bytes]], pause_s: float = 0.0) -> None:
    """Bring up one that meets nobody and gives these contents, each with its name; it waits before each piece of a result."""

    async def gives(purpose: Purpose, stream: Stream) -> None:
        if purpose is Purpose.MEET:
            await stream.receive()
            await stream.send(Refusal(RefusalCode.BUSY))
            return
        while isinstance(request := await stream.receive(), FetchRequest):
            if request.kind not in OF_RESULT:
                await stream.send(Refusal(RefusalCode.NOT_READY))
                return
            try:
                whole, name = answer(request.kind)
            except Refused as refusal:
                await stream.send(Refusal(refusal.code))
                return
            part = bytes(whole[request.offset : request.offset + request.num_bytes])
            if part and request.kind is ContentsKind.RESULT:
                await asyncio.sleep(pause_s)
            header = Contents(request.kind, len(whole), hashlib.sha256(part).digest(), 0, name)
            await stream.send(header.signed(MALLORY, *request.asked))
            if part:
                await stream.send(Chunk(Part.CONTENTS, request.offset, part))

    swarm.network.start_peer(MALLORY.peer_id, gives)


def test_one_that_claims_to_be_done_ends_nobodys_training(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = swarm.start(4)
        an_attacker(swarm)
        await asyncio.sleep(5.0)
        for peer in peers:
            peer.book.note_call(MALLORY.peer_id, asyncio.get_running_loop().time(), 10, finished=True)
        await asyncio.sleep(20.0)
        assert all(peer.trainer.replica.phase is RunPhase.TRAIN and peer.node.source.result is None for peer in peers)

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 100_000})), story)


def test_a_result_that_predicts_worse_is_rejected_and_the_others_agree_on_their_own(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = swarm.start(3)
        an_attacker(swarm)
        await asyncio.sleep(5.0)
        for peer in peers:
            peer.book.note_meeting(MALLORY.peer_id, asyncio.get_running_loop().time(), 40, finished=True)
        await swarm.until(lambda: all(peer.is_done for peer in peers), within_s=90.0)
        assert torch.equal(peers[0].fast, peers[1].fast) and torch.equal(peers[0].fast, peers[2].fast)

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 60})), story)


def test_one_that_has_met_us_and_gives_its_result_drop_by_drop_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 500)
    monkeypatch.setattr(result_agreement, "STRANGERS_S", 5.0)

    async def story(swarm: Swarm) -> None:
        peers = swarm.start(3)
        an_attacker(swarm, pause_s=15.0)
        await asyncio.sleep(5.0)
        for peer in peers:
            peer.book.note_meeting(MALLORY.peer_id, asyncio.get_running_loop().time(), 40, finished=True)
        await swarm.until(lambda: all(peer.lifecycle.finished for peer in peers))
        await swarm.until(lambda: all(peer.is_done for peer in peers), within_s=240.0)  # to the end it would give for sixteen minutes
        assert len({peer.node.source.result.name for peer in peers if peer.node.source.result}) == 1

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 60})), story)


def test_one_that_comes_first_and_names_a_result_that_it_never_gives_ends_nobodys_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = SybilGroups.drawn

    def first(groups: SybilGroups, peer: PeerId, *rest: Any) -> tuple[bytes, bytes]:
        return (b"", b"") if peer == MALLORY.peer_id else drawn(groups, peer, *rest)

    monkeypatch.setattr(SybilGroups, "drawn", first)

    def answer(kind: ContentsKind) -> tuple[memoryview, bytes]:
        if kind is ContentsKind.RESULT_HASHES:
            raise Refused(RefusalCode.BUSY)
        return memoryview(b""), bytes(31) + b"x"

    async def story(swarm: Swarm) -> None:
        peers = swarm.start(3)
        bring_up(swarm, answer)
        await asyncio.sleep(5.0)
        for peer in peers:
            peer.book.note_meeting(MALLORY.peer_id, asyncio.get_running_loop().time(), 40, finished=True)
        await swarm.until(lambda: all(peer.is_done for peer in peers), within_s=300.0)
        assert len({peer.node.source.result.name for peer in peers if peer.node.source.result}) == 1

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 60})), story)


def test_peers_that_fetch_the_result_give_each_other_what_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 2500)
    line = Wire(latency_s=0.02, bytes_per_s=15000.0)
    took_s: list[float] = []

    async def story(swarm: Swarm) -> None:
        peers = swarm.start(8)
        await swarm.until(lambda: all(peer.node.source.result or peer.node.source.coming for peer in peers), within_s=600.0)
        began_s = asyncio.get_running_loop().time()
        await swarm.until(lambda: all(peer.node.source.result for peer in peers), within_s=600.0)
        took_s.append(asyncio.get_running_loop().time() - began_s)
        await swarm.until(lambda: all(peer.is_done for peer in peers), within_s=600.0)
        assert len({result.name for peer in peers if (result := peer.node.source.result)}) == 1

    swarm = Swarm(tmp_path, seed=2, manifest=tiny_manifest(run={"total_steps": 60}), wire=line)
    play(swarm, story)
    one_transfer_s = swarm.terms.state_bytes / line.bytes_per_s
    assert took_s[0] < 7.0 * one_transfer_s, "seven copies over one upload take more than that"


def test_peers_do_not_linger_for_one_that_has_all_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(swarm: Swarm) -> None:
        peers = swarm.start(4)
        await swarm.until(lambda: all(peer.node for peer in peers))
        place = SybilGroups(peers[0].book, swarm.terms).drawn
        *quick, slow = sorted(peers, key=lambda peer: place(peer.peer_id, None))  # the last one does not write it down
        at_once = slow.link.request

        async def later(request: messages.AnsweredRequest) -> messages.Reply:
            if isinstance(request, messages.Adopt):
                await swarm.until(lambda: all(peer.is_done for peer in quick), within_s=90.0)
            return await at_once(request)

        monkeypatch.setattr(slow.link, "request", later)
        await swarm.until(lambda: all(peer.node.source.result for peer in quick) and slow.node.source.coming, within_s=90.0)
        await swarm.until(lambda: all(peer.is_done for peer in quick), within_s=result_agreement.LINGER_S / 2)
        assert slow.node.source.coming and not slow.node.source.result
        await swarm.until(lambda: slow.is_done, within_s=90.0)
        assert torch.equal(slow.fast, quick[0].fast)

    play(Swarm(tmp_path, seed=2, manifest=tiny_manifest(run={"total_steps": 60})), story)


@pytest.mark.parametrize(
    ("has", "is_met", "waits"),
    [
        ("seen it agreed", True, False),
        ("all of it", True, True),  # it may still refuse it
        ("seen another agreed", True, True),
        ("all of it", False, False),
        ("some of it", False, True),
    ],
)
def test_a_peer_is_waited_for_until_it_takes_no_other_result(has: str, is_met: bool, waits: bool, tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = swarm.start(2)
        num_pieces = files.count(swarm.terms.state_bytes)

        def judging(kind: ContentsKind) -> tuple[memoryview, bytes]:
            result = next((peer.node.source.result for peer in peers if peer.node.source.result), None)
            name = bytes(32) if has == "seen another agreed" or result is None else result.name
            if kind is ContentsKind.RESULT_AGREED and has.startswith("seen"):
                return memoryview(b""), name
            if kind is not ContentsKind.RESULT_PIECES:
                return memoryview(b""), b""
            return memoryview(to_bits(range(num_pieces - (has == "some of it")), num_pieces)), name

        bring_up(swarm, judging)
        await asyncio.sleep(5.0)
        for peer in peers:
            now_s = asyncio.get_running_loop().time()
            peer.book.note_call(MALLORY.peer_id, now_s, 10)
            if is_met:
                peer.book.note_meeting(MALLORY.peer_id, now_s, 10)
        await swarm.until(lambda: all(peer.node.source.result for peer in peers), within_s=90.0)
        began_s = asyncio.get_running_loop().time()
        await swarm.until(lambda: all(peer.is_done for peer in peers), within_s=90.0)
        assert (asyncio.get_running_loop().time() - began_s > result_agreement.LINGER_S / 2) == waits

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 60})), story)


@pytest.mark.parametrize("num_peers", [2, 5])
def test_nobody_waits_for_peers_that_have_left_with_the_result_even_if_no_farewell_comes(
    num_peers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(presence: Presence, within_s: float) -> None:
        """Others hear nothing of it."""

    monkeypatch.setattr(Presence, "leave", lost)

    async def leave(peer: Peer) -> None:
        await peer.until_over()
        peer.kill()

    async def story(swarm: Swarm) -> None:
        peers = swarm.start(num_peers)
        leaving = [asyncio.create_task(leave(peer)) for peer in peers]
        await swarm.until(lambda: all(peer.node.source.result for peer in peers), within_s=90.0)
        async with asyncio.timeout(result_agreement.LINGER_S / 2):
            await asyncio.gather(*leaving)

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 60})), story)


def test_a_member_that_asks_and_takes_nothing_keeps_nobody_at_the_end(tmp_path: Path) -> None:
    """The others wait for a member only while it takes the result, at an eighth of the slowest allowed rate at least."""

    async def ask_for_ever(swarm: Swarm, source: Peer) -> None:
        client = FetchClient(MALLORY, swarm.terms.run_id, OwnCredential(None), swarm.network.peers[MALLORY.peer_id])
        while True:
            with contextlib.suppress(GossamerError):
                async with client.source(source.peer_id, ()) as asking:
                    while True:
                        await asking.header(ContentsKind.RESULT_PIECES)
                        await asyncio.sleep(1.0)
            await asyncio.sleep(0.5)

    async def story(swarm: Swarm) -> None:
        peers = swarm.start(3)
        bring_up(swarm, lambda kind: (memoryview(b""), b""))
        await asyncio.sleep(5.0)
        for peer in peers:
            peer.book.note_call(MALLORY.peer_id, loop_s(), 60, finished=True)
            peer.book.note_meeting(MALLORY.peer_id, loop_s(), 60, finished=True)
        asking = [asyncio.create_task(ask_for_ever(swarm, peer)) for peer in peers]
        await swarm.until(lambda: all(peer.node.source.agreed for peer in peers), within_s=90.0)
        began_s = loop_s()
        await swarm.until(lambda: all(peer.is_done for peer in peers), within_s=90.0)
        assert result_agreement.LINGER_S < loop_s() - began_s < TAKING_S + result_agreement.LINGER_S, loop_s() - began_s
        await cancel(*asking)

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 60})), story)


def test_a_trainer_that_dies_over_the_result_leaves_it_to_the_next_one(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        *others, last = sorted(swarm.start(3), key=lambda peer: peer.peer_id)
        ask_trainer = last.link.request

        async def dying(request: messages.AnsweredRequest) -> messages.Reply:
            if isinstance(request, messages.Adopt) and request.is_result:
                last.link.request = ask_trainer
                last.kill_trainer()
            return await ask_trainer(request)

        last.link.request = dying
        await swarm.until(lambda: all(peer.is_done for peer in others), within_s=120.0)
        assert not last.node.source.result and last.node.source.coming is not None
        last.restart_trainer()
        await swarm.until(lambda: last.is_done, within_s=90.0)
        assert torch.equal(last.fast, others[0].fast)

    play(Swarm(tmp_path, seed=1, manifest=tiny_manifest(run={"total_steps": 60})), story)


def test_a_result_that_a_power_loss_has_spoiled_is_fetched_again(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        *others, last = sorted(swarm.start(3), key=lambda peer: peer.peer_id)
        await swarm.until(lambda: last.node.source.coming is not None and last.node.source.coming.held() == b"\x01", within_s=90.0)
        assert last.node.source.coming is not None
        content = last.node.source.coming.content
        assert isinstance(content, Pieces)
        last.save()
        last.home.peers.write_bytes(last.book.to_bytes(asyncio.get_running_loop().time()))
        last.kill()
        content.path.write_bytes(bytes(content.num_bytes))
        last.start()
        await swarm.until(lambda: last.is_done and all(peer.is_done for peer in others), within_s=90.0)
        assert torch.equal(last.fast, others[0].fast) and last.fast.any()

    play(Swarm(tmp_path, seed=1, manifest=tiny_manifest(run={"total_steps": 60})), story)


@pytest.mark.parametrize("has_changed", [True, False])
def test_a_source_that_has_another_result_by_now_does_not_misbehave(has_changed: bool, tmp_path: Path) -> None:
    """Only one that gives other hashes under the name of the result does."""

    async def story(swarm: Swarm) -> None:
        data = memoryview(bytes(swarm.terms.state_bytes))
        one, other = RunResult.of(data), RunResult.of(memoryview(b"\x01" + bytes(data[1:])))
        bring_up(swarm, lambda kind: (memoryview(other.hashes), (other if has_changed else one).name))
        identity = Identity(bytes([200]) * 32)
        client = FetchClient(identity, swarm.terms.run_id, OwnCredential(), swarm.network.start_peer(identity.peer_id, nobody))
        async with contextlib.AsyncExitStack() as stack:
            source = await stack.enter_async_context(client.source(MALLORY.peer_id, ()))
            with pytest.raises(Refused if has_changed else BadMessage, match="another result"):
                await fetch_hashes(source, one.name, swarm.terms.state_bytes)

    play(Swarm(tmp_path), story)


def test_a_piece_of_another_result_is_detected() -> None:
    data = memoryview(b"".join(number.to_bytes(4, "big") for number in range(64_000)))
    result = RunResult.of(data)
    for run in (range(1), range(1, 3), range(4)):
        part = bytes(data[PIECE * run.start : PIECE * run.stop])
        result.verify(MALLORY.peer_id, run, part)
        for other in (part[:-1] + b"x", part[:-1], b"x"):
            with pytest.raises(BadMessage):
                result.verify(MALLORY.peer_id, run, other)
    with pytest.raises(Refused, match="another result"):
        result.check(MALLORY.peer_id, Contents(ContentsKind.RESULT, len(data), bytes(32), 0, bytes(32)))
    assert result.held() == b"\x0f" and bytes(result.part(PIECE, 10)) == bytes(data[PIECE : PIECE + 10])


def test_what_has_come_of_a_result_is_given_on_and_the_rest_refused(tmp_path: Path) -> None:
    data = b"".join(number.to_bytes(4, "big") for number in range(64_000))
    with contextlib.closing(Pieces.open(tmp_path / "result", bytes(32), len(data))) as pieces:
        pieces.put(range(2, 3), data[2 * PIECE : 3 * PIECE], 0)
        coming = RunResult(RunResult.of(memoryview(data)).hashes, pieces)
        assert coming.held() == b"\x04" and bytes(coming.part(2 * PIECE, 5)) == data[2 * PIECE : 2 * PIECE + 5]
        with pytest.raises(Refused, match="piece of the result is not here"):
            coming.part(0, 5)
