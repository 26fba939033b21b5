"""Bulk streams: bytes beside a call of two real p2pds, and what a stranger can do with an inbound one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gossamer.protocol.errors import PeerGone
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p import bulk
from gossamer.protocol.libp2p.bulk import READY, TOKEN_BYTES, InboundBulk
from gossamer.protocol.libp2p.grpc_stream import GrpcStream
from gossamer.protocol.libp2p.hivemind_imports import p2pd_pb2, write_pbmsg
from gossamer.protocol.libp2p.splice import CarriedBytes, Pair, drop
from gossamer.protocol.limits import ANSWER_BYTES, CHUNK_BYTES
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.protocol.libp2p.test_outbound import called
from tests.protocol.peers import chunk, number_of, seeded

pytestmark = pytest.mark.real_time

DATA = os.urandom(3 * CHUNK_BYTES + 17)
OPENER, OTHER = seeded(1).peer_id, seeded(2).peer_id
TOKEN = bytes(range(TOKEN_BYTES))


@asynccontextmanager
async def conversation(folder: Path, giver: Callable[[Stream], Awaitable[None]]) -> AsyncIterator[tuple[Stream, tuple[CarriedBytes, ...]]]:
    """Yield the caller's end of a stream between two real p2pds, whose other end is the giver's, and what both p2pds carried."""

    async def handle(_: Purpose, stream: Stream) -> None:
        with suppress(PeerGone):
            await giver(stream)

    carried = CarriedBytes(), CarriedBytes()
    async with called(folder, handle, carried) as connect:
        stream = await connect(Purpose.FETCH)
        yield stream, carried
        stream.close()


async def give(stream: Stream) -> None:
    """Answer each message with all of DATA, by the bulk stream."""
    while True:
        await stream.receive()
        for begin in range(0, len(DATA), CHUNK_BYTES):
            await stream.send_bytes(memoryview(DATA)[begin : begin + CHUNK_BYTES])


async def take(stream: Stream) -> bytes:
    await stream.send(chunk(1))
    data = bytearray(len(DATA))
    await stream.receive_into(memoryview(data)[:1])
    await stream.receive_into(memoryview(data)[1:])
    return bytes(data)


async def test_bytes_that_follow_at_once_when_a_bulk_stream_opens_are_not_lost(folder: Path) -> None:
    """The side that answers a lane may be in the middle of a hop when its bulk stream opens."""
    accepted: list[Pair] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append((reader, writer))
        assert await reader.readexactly(TOKEN_BYTES) == TOKEN
        writer.write(READY + DATA)

    class Dialling:
        async def open_stream(self, partner: PeerId, protocol: str) -> tuple[Pair, str]:
            return await asyncio.open_unix_connection(folder / "socket"), ""

    control: Any = Dialling()
    async with await asyncio.start_unix_server(accept, folder / "socket"):
        carried = CarriedBytes()
        stream = await bulk.open_bulk(control, OTHER, TOKEN, carried)
        taken = bytearray(len(DATA))
        await stream.receive_into(memoryview(taken))
        assert taken == DATA and carried.received == len(DATA)
        stream.close()
        drop(accepted[0][1])


async def test_bytes_pass_unchanged_beside_the_messages_and_are_counted(folder: Path) -> None:
    async def giver(stream: Stream) -> None:
        await stream.receive()
        await give(stream)

    async with conversation(folder, giver) as (stream, carried):
        await stream.send(chunk(0))
        assert stream.answer_bytes == CHUNK_BYTES
        await stream.open_bulk()
        assert stream.answer_bytes == ANSWER_BYTES
        for _ in range(3):
            assert await take(stream) == DATA
        for side, num_bytes in ((carried[0].received, stream.bytes_received), (carried[1].sent, stream.bytes_received)):
            assert 3 * len(DATA) <= num_bytes <= side < num_bytes + 10_000


async def test_the_gates_of_a_stream_limit_its_bulk_stream_too(folder: Path) -> None:
    passed: list[int] = []

    async def gate(num_bytes: int) -> None:
        passed.append(num_bytes)

    async with conversation(folder, give) as (stream, _):
        stream.set_gates(gate, gate)
        await stream.open_bulk()
        await take(stream)
        assert sum(passed[1:]) == len(DATA)


async def test_a_bulk_stream_ends_with_its_call(folder: Path) -> None:
    async def giver(stream: Stream) -> None:
        await stream.receive()
        await stream.send_bytes(memoryview(DATA))
        stream.close()

    async with conversation(folder, giver) as (stream, _):
        await stream.open_bulk()
        await stream.send(chunk(1))
        with pytest.raises(PeerGone):
            await stream.receive_into(memoryview(bytearray(1 + len(DATA))))
        with pytest.raises(PeerGone):
            await stream.receive_into(memoryview(bytearray(1)))


async def test_a_giver_learns_that_nobody_takes_its_bytes(folder: Path) -> None:
    ended = asyncio.Event()

    async def giver(stream: Stream) -> None:
        await stream.receive()
        with pytest.raises(PeerGone):
            while True:
                await stream.send_bytes(memoryview(DATA))
        ended.set()

    async with conversation(folder, giver) as (stream, _):
        await stream.open_bulk()
        await stream.send(chunk(1))
        await stream.receive_into(memoryview(bytearray(10)))
        stream.close()
        async with asyncio.timeout(10.0):
            await ended.wait()


async def test_a_partner_without_bulk_streams_serves_chunks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    async def giver(stream: Stream) -> None:
        while True:
            await stream.send(await stream.receive())

    async with conversation(folder, giver) as (stream, _):
        monkeypatch.setattr(bulk, "PROTOCOL", "/gossamer/bulk/0")  # the other side listens for another name
        await stream.open_bulk()
        assert stream.answer_bytes == CHUNK_BYTES
        with pytest.raises(PeerGone, match="no bulk stream"):
            await stream.receive_into(memoryview(bytearray(1)))
        await stream.send(chunk(7))
        assert await number_of(stream) == 7


# ------------------------------------------------------------------ inbound bulk streams


class Listening:
    """A p2pd that accepts every listener."""

    async def receive_streams(self, protocol: str, listener: Path) -> None:
        assert protocol == bulk.PROTOCOL


class Inbound:
    """The receiving end of bulk streams, and those who open them."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.bulk = InboundBulk(folder / "bulk.sock")
        self._stack, self._path = stack, folder / "bulk.sock"

    def call_of(self, partner: PeerId, token: bytes) -> GrpcStream:
        stream = GrpcStream(partner, nothing, lambda _: None)
        self._stack.enter_context(self.bulk.expecting(token, stream, CarriedBytes()))
        self._stack.callback(stream.close)
        return stream

    async def come(self, partner: PeerId, token: bytes) -> Pair:
        reader, writer = await asyncio.open_unix_connection(self._path)
        self._stack.callback(drop, writer)
        await write_pbmsg(writer, p2pd_pb2.StreamInfo(peer=partner.raw, addr=b"\x04\x7f\x00\x00\x01\x06\x00\x01", proto=bulk.PROTOCOL))
        writer.write(token)
        return reader, writer


async def nothing(_: bytes) -> None:
    return


@pytest.fixture
@asynccontextmanager
async def inbound(folder: Path) -> AsyncIterator[Inbound]:
    async with AsyncExitStack() as stack:
        inbound = Inbound(stack, folder)
        control: Any = Listening()
        await stack.enter_async_context(inbound.bulk.serving(control))
        yield inbound


async def answer(pair: Pair) -> bytes:
    """Return what the receiving end answers, nothing once it has hung up."""
    async with asyncio.timeout(5.0):
        try:
            return await pair[0].read(10)
        except ConnectionError:
            return b""


async def test_a_bulk_stream_is_attached_to_the_call_that_it_names(inbound: Inbound) -> None:
    one, other = inbound.call_of(OPENER, TOKEN), inbound.call_of(OPENER, TOKEN[::-1])
    assert await answer(await inbound.come(OPENER, TOKEN[::-1])) == READY
    assert (one.answer_bytes, other.answer_bytes) == (CHUNK_BYTES, ANSWER_BYTES)


@pytest.mark.parametrize(
    ("who", "token"), [(OPENER, bytes(TOKEN_BYTES)), (OTHER, TOKEN), (seeded(3).peer_id, TOKEN)], ids=["token", "caller", "nobody"]
)
async def test_a_bulk_stream_that_no_call_expects_is_ended(who: PeerId, token: bytes, inbound: Inbound) -> None:
    calls = inbound.call_of(OPENER, TOKEN), inbound.call_of(OTHER, TOKEN[::-1])
    assert not await answer(await inbound.come(who, token))
    assert all(call.answer_bytes == CHUNK_BYTES for call in calls)


async def test_a_call_has_one_bulk_stream(inbound: Inbound) -> None:
    inbound.call_of(OPENER, TOKEN)
    assert await answer(await inbound.come(OPENER, TOKEN)) == READY
    assert not await answer(await inbound.come(OPENER, TOKEN))


async def test_a_partner_holds_no_more_places_than_it_has_calls(inbound: Inbound) -> None:
    call = inbound.call_of(OPENER, TOKEN)
    silent = await inbound.come(OPENER, b"")
    await asyncio.sleep(0)
    assert not await answer(await inbound.come(OPENER, TOKEN))
    drop(silent[1])
    async with asyncio.timeout(5.0):
        while call.answer_bytes == CHUNK_BYTES:
            await answer(await inbound.come(OPENER, TOKEN))


async def test_a_bulk_stream_that_names_nothing_is_ended(monkeypatch: pytest.MonkeyPatch, inbound: Inbound) -> None:
    monkeypatch.setattr(bulk, "OPEN_S", 0.05)
    inbound.call_of(OPENER, TOKEN)
    assert not await answer(await inbound.come(OPENER, TOKEN[:-1]))
