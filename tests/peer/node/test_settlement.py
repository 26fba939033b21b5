"""A result that means no good: not taken while the run goes on, and not when it predicts worse."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import torch

from protocol.errors import RefusalCode
from protocol.messages.messages import Chunk, Contents, ContentsKind, FetchRequest, Part, Refusal, RunPhase
from protocol.streams.transport import Purpose, Stream
from tests.swarm.mallory import MALLORY
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Swarm, play


def a_liar(swarm: Swarm) -> None:
    """Bring up one that has a result for everybody: sound numbers, and no model."""
    num_bytes = swarm.terms.state_bytes
    draws = torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(1)) * 0.3
    data = torch.cat((draws, torch.zeros(num_bytes // 4))).bfloat16().view(torch.int16).numpy().tobytes()
    name = hashlib.sha256(data).digest()

    async def gives(purpose: Purpose, stream: Stream) -> None:
        if purpose is Purpose.MEET:
            await stream.receive()
            await stream.send(Refusal(RefusalCode.BUSY))
            return
        while isinstance(request := await stream.receive(), FetchRequest) and request.kind is ContentsKind.RESULT:
            part = data[request.offset : request.offset + request.num_bytes]
            header = Contents(request.kind, num_bytes, hashlib.sha256(part).digest(), 0, name)
            await stream.send(header.signed(MALLORY, *request.asked))
            if part:
                await stream.send(Chunk(Part.CONTENTS, request.offset, part))

    swarm.network.transport(MALLORY.peer_id, gives)


def test_one_that_claims_to_be_done_ends_nobodys_training(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = swarm.start(4)
        a_liar(swarm)
        await asyncio.sleep(5.0)
        for peer in peers:
            peer.book.saw(MALLORY.peer_id, asyncio.get_running_loop().time(), 10, finished=True)
        await asyncio.sleep(20.0)
        assert all(peer.trainer.replica.phase is RunPhase.TRAIN and peer.node.donor.result is None for peer in peers)

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 100_000})), story)


def test_a_result_that_predicts_worse_is_left_and_the_others_settle_on_their_own(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = swarm.start(3)
        a_liar(swarm)
        await asyncio.sleep(5.0)
        for peer in peers:
            peer.book.saw(MALLORY.peer_id, asyncio.get_running_loop().time(), 40, finished=True)
        await swarm.until(lambda: all(peer.is_done for peer in peers), within_s=90.0)
        assert torch.equal(peers[0].fast, peers[1].fast) and torch.equal(peers[0].fast, peers[2].fast)
        assert any("kept our own weights" in said.reason for peer in peers for said in peer.said)

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 60})), story)
