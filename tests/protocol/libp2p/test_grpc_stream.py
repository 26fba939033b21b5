"""The gRPC service over a Unix socket: which frames and calls it accepts and rejects."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from gossamer.protocol import limits
from gossamer.protocol.errors import PeerGone, TransportError, Unreachable
from gossamer.protocol.libp2p.grpc_stream import (
    ACCEPTED,
    BROKEN,
    SERVICE,
    UNWANTED_BYTES,
    Context,
    GrpcStream,
    accepted,
    open_channel,
    refuse_excess,
    start_call,
    start_server,
)
from gossamer.protocol.streams.transport import Purpose
from tests.protocol.peers import chunk, seeded

pytestmark = pytest.mark.real_time

PARTNER = seeded(1).peer_id


async def serve(purpose: Purpose, context: Context) -> None:
    """Echo all frames; reject FETCH calls."""
    if purpose is Purpose.FETCH:
        await refuse_excess(context)
    with suppress(*BROKEN):
        await context.send_initial_metadata(ACCEPTED)
        while isinstance(frame := await context.read(), bytes):
            await context.write(frame)


@pytest.fixture
@asynccontextmanager
async def path(folder: Path) -> AsyncIterator[Path]:
    """Serve calls; yield the Unix socket of the service."""
    server = await start_server(serve, folder / "s")
    yield folder / "s"
    await server.stop(None)


async def test_a_refused_call_is_unreachable(path: Path) -> None:
    channel = open_channel(path)
    call = start_call(channel, Purpose.FETCH)
    with pytest.raises(Unreachable, match="too many open streams"):
        await accepted(call)
    await channel.close()


async def test_a_call_to_a_missing_server_is_unreachable(path: Path) -> None:
    channel = open_channel(path.with_name("nothing"))
    call = start_call(channel, Purpose.MEET)
    with pytest.raises(Unreachable):
        await accepted(call)
    await channel.close()


def test_a_service_without_a_place_for_its_socket_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="could not listen on"):
        asyncio.run(start_server(serve, tmp_path / "missing" / "peer.sock"))
    gc.collect()


async def test_a_frame_above_the_limit_ends_the_stream(path: Path) -> None:
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/Meet")()
        await call.write(bytes(limits.FRAME_BYTES + 1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_compressed_calls_are_refused(path: Path) -> None:
    async with grpc.aio.insecure_channel(f"unix:{path}", compression=grpc.Compression.Gzip) as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/Meet")()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await call.write(bytes(100_000))
            while True:
                assert await call.read() is not grpc.aio.EOF
        assert await call.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)


async def test_an_unknown_method_is_refused(path: Path) -> None:
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        assert await channel.stream_stream(f"/{SERVICE}/Other")().code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stream_writes_nothing_after_its_end() -> None:
    """grpc.aio may crash if the context of an ended call is used."""
    written: list[bytes] = []

    async def write(frame: bytes) -> None:
        written.append(frame)

    for finish in (lambda stream: stream.end("over"), GrpcStream.close):
        stream = GrpcStream(PARTNER, write, lambda _: None)
        await stream.send(chunk(1))
        finish(stream)
        with pytest.raises(PeerGone):
            await stream.send(chunk(2))
    assert len(written) == 2


async def test_frames_after_close_are_read_only_up_to_a_limit() -> None:
    num_read = 0

    async def read() -> bytes:
        nonlocal num_read
        num_read += 1
        return bytes(limits.FRAME_BYTES)

    async def write(frame: bytes) -> None:
        raise AssertionError("nothing is written")

    stream = GrpcStream(PARTNER, write, lambda _: None)
    stream.close()
    async with asyncio.timeout(5):
        await stream.pump(read)
    assert UNWANTED_BYTES < num_read * limits.FRAME_BYTES <= UNWANTED_BYTES + limits.FRAME_BYTES
