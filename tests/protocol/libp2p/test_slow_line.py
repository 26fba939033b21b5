"""Slow lines, on which megabytes are still in transit when a side closes, and partners that never end a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from gossamer.protocol.errors import PeerGone, Unreachable
from gossamer.protocol.libp2p.p2pd import Daemon
from gossamer.protocol.libp2p.splice import drop
from gossamer.protocol.streams.transport import Purpose, Stream, StreamHandler, Transport
from gossamer.protocol.tasks import cancel
from tests.protocol.peers import chunk, nobody, number_of
from tests.protocol.worlds import open_tunnel

pytestmark = pytest.mark.real_time

CHUNK = 256 * 1024
NUM_CHUNKS = 16
BYTES_PER_S = 600_000
LINGER_S = 2.5  # less than one flow-control window takes on this line


class Line:
    """A TCP proxy that is limited to BYTES_PER_S in each direction."""

    def __init__(self, stack: AsyncExitStack, port: int) -> None:
        self._stack = stack
        self._far_port = port
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> int:
        listening = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK)
        self._stack.push_async_callback(self._end)
        self._stack.callback(listening.close)
        port: int = listening.sockets[0].getsockname()[1]
        return port

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await asyncio.open_connection("127.0.0.1", self._far_port, limit=CHUNK)
        for source, sink in ((reader, far[1]), (far[0], writer)):
            self._tasks.append(asyncio.create_task(self._carry(source, sink)))
            self._stack.callback(drop, sink)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        free_s = loop.time()
        with suppress(OSError):
            while data := await source.read(16 * 1024):
                free_s = max(free_s, loop.time()) + len(data) / BYTES_PER_S
                await asyncio.sleep(free_s - loop.time())
                sink.write(data)
                await sink.drain()
        drop(sink)

    async def _end(self) -> None:
        await cancel(*self._tasks)


class World:
    """Real p2pd processes behind slow lines."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack = stack
        self._home = folder
        self._num_peers = 0

    async def peer(self, handler: StreamHandler) -> tuple[Daemon, Transport]:
        self._num_peers += 1
        return await open_tunnel(self._stack, self._home / str(self._num_peers), handler)

    async def slow_stream(self, handler: StreamHandler) -> Stream:
        """Open a stream to a new peer, over a slow line."""
        near, far = await self.peer(nobody), await self.peer(handler)
        port = await Line(self._stack, far[0].port).open()
        return await near[1].connect(far[0].peer_id, [f"/ip4/127.0.0.1/tcp/{port}"], Purpose.FETCH)


@pytest.fixture
@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack, folder)


async def send_all(stream: Stream) -> None:
    for number in range(NUM_CHUNKS):
        await stream.send(chunk(number, CHUNK))


async def receive_all(stream: Stream) -> None:
    assert [await number_of(stream) for _ in range(NUM_CHUNKS)] == list(range(NUM_CHUNKS))


async def test_the_last_messages_of_a_handler_arrive_over_a_slow_line(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr("gossamer.protocol.streams.admission.LINGER_S", LINGER_S)

    async def give(purpose: Purpose, stream: Stream) -> None:
        await stream.receive()
        await send_all(stream)

    stream = await world.slow_stream(give)
    await stream.send(chunk(0))
    await receive_all(stream)
    stream.close()


async def test_the_last_messages_of_a_caller_arrive_over_a_slow_line(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr("gossamer.protocol.libp2p.outbound.LINGER_S", LINGER_S)
    received = asyncio.Event()

    async def take(purpose: Purpose, stream: Stream) -> None:
        await receive_all(stream)
        received.set()

    stream = await world.slow_stream(take)
    await send_all(stream)
    stream.close()
    await received.wait()


async def test_the_oldest_calls_that_a_partner_never_ends_are_cancelled(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr("gossamer.protocol.libp2p.outbound.MAX_CLOSING", 1)

    async def stay(purpose: Purpose, stream: Stream) -> None:
        await stream.send(await stream.receive())
        await asyncio.Event().wait()

    async def connect(near: Transport, far: Daemon) -> Stream:
        stream = await near.connect(far.peer_id, far.addresses, Purpose.MEET)
        await stream.send(chunk(1))
        await number_of(stream)
        return stream

    (_, near), (far, _) = await world.peer(nobody), await world.peer(stay)
    streams = [await connect(near, far), await connect(near, far)]
    for stream in streams:
        with pytest.raises(Unreachable):
            await connect(near, far)
        stream.close()
    async with asyncio.timeout(5):
        while True:
            with suppress(Unreachable, PeerGone):
                (await connect(near, far)).close()
                return
