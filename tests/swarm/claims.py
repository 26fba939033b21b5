"""Holders of chosen stages, and strangers beside them that claim stages."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from gossamer.protocol.errors import PeerGone, RefusalCode
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.messages import Chunk, Contents, ContentsKind, FetchRequest, Part, Refusal
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.swarm.holders import ADDRESSES, Holder, StagedRun

STRANGER, *STRANGERS = (Identity(bytes([number]) * 32) for number in range(100, 160))  # on the list of members, and no holders


def staged(folder: Path, *stages: int, count: int = 2, met: bool = True, service_s: float = 0.5) -> StagedRun:
    """Holders of these stages, which can hold any other one too once they have begun."""
    run = StagedRun(folder, count, len(stages), others=[STRANGER, *STRANGERS], service_s=service_s)
    for holder, stage in zip(run.holders, stages, strict=True):
        holder.home.stage.write_text(f"{stage + 1}\n")
        mates = [other for other, at in zip(run.holders, stages, strict=True) if at == stage and other is not holder]
        know(holder, [mate.peer_id for mate in mates], met=met)
    return run


def know(holder: Holder, others: Sequence[PeerId], *, met: bool, saved_s: float | None = None) -> None:
    """Give a holder the address book of an earlier session: scripted trainers exchange no weights, so holders meet nobody in this one."""
    known = [{"peer": str(other), "addresses": list(ADDRESSES), "met": met} for other in others]
    holder.home.peers.write_text(json.dumps({"saved_s": saved_s, "known": known, "banned": []}))


async def refuse(stream: Stream) -> None:
    """Lack the weights."""
    await stream.receive()
    await stream.send(Refusal(RefusalCode.NOT_READY))


def forging(stranger: Identity, step: Callable[[], int] = int) -> Callable[[Stream], Awaitable[None]]:
    """Claim to have weights of the right size."""

    async def forge(stream: Stream) -> None:
        request = await stream.receive()
        if isinstance(request, FetchRequest) and request.kind is ContentsKind.STATE:
            header = Contents(request.kind, 800, hashlib.sha256(b"").digest(), global_step=step())
            await stream.send(header.signed(stranger, *request.asked))
        else:
            await stream.send(Refusal(RefusalCode.NOT_READY))

    return forge


forge = forging(STRANGER)


def trickling(stranger: Identity, num_bytes: int, step: Callable[[], int], every_s: float) -> Callable[[Stream], Awaitable[None]]:
    """Claim to have weights of the right size, and give a piece of them every so often."""
    next_s = 0.0

    async def trickle(stream: Stream) -> None:
        nonlocal next_s
        while True:
            request = await stream.receive()
            if not isinstance(request, FetchRequest) or request.kind is not ContentsKind.STATE:
                await stream.send(Refusal(RefusalCode.NOT_READY))
                return
            data, now_s = bytes(request.num_bytes), asyncio.get_running_loop().time()
            while data and now_s < next_s:
                await stream.receive()  # until the asker gives up
            next_s = now_s + every_s if data else next_s
            header = Contents(request.kind, num_bytes, hashlib.sha256(data).digest(), global_step=step())
            await stream.send(header.signed(stranger, *request.asked))
            if data:
                await stream.send(Chunk(Part.CONTENTS, request.offset, data))

    return trickle


async def stay_silent(stream: Stream) -> None:
    await stream.receive()
    await stream.receive()  # the asker gives up


def claim_of(run: StagedRun, stranger: Identity, stage: int, global_step: int = 0, *, finished: bool = False) -> MemberRecord:
    now_s = int(run.network.now_s())
    record = MemberRecord(run.manifest.run_id, stranger.peer_id, ADDRESSES, global_step, finished, now_s, now_s + 90, None, stage=stage + 1)
    return record.signed(stranger)


async def claim(
    run: StagedRun,
    stage: int,
    global_step: int = 0,
    *,
    finished: bool = False,
    stranger: Identity = STRANGER,
    answer: Callable[[Stream], Awaitable[None]] = refuse,
) -> None:
    """Claim a stage for a stranger, for ever."""

    async def handle(purpose: Purpose, stream: Stream) -> None:
        with suppress(PeerGone):
            await answer(stream)

    run.network.start_peer(stranger.peer_id, handle)
    while True:
        await run.network.peers[stranger.peer_id].announce(claim_of(run, stranger, stage, global_step, finished=finished))
        await asyncio.sleep(10.0)


@asynccontextmanager
async def claiming(
    run: StagedRun, *claims: Coroutine[None, None, None], strangers: Sequence[Identity] = (STRANGER,)
) -> AsyncIterator[None]:
    """Have strangers claim stages for the body."""
    tasks = [asyncio.create_task(each) for each in claims]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for stranger in strangers:
            run.network.kill(stranger.peer_id)
