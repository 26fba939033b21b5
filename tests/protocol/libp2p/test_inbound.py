"""Inbound streams from a scripted p2pd: which calls are served, and when connections are dropped."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from gossamer.protocol.errors import PeerGone, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p import bulk, outbound, tunnel
from gossamer.protocol.libp2p.grpc_stream import SERVICE, accepted, open_channel, start_call
from gossamer.protocol.libp2p.hivemind_imports import p2pd_pb2, write_pbmsg
from gossamer.protocol.libp2p.splice import CarriedBytes, Pair, drop, splice
from gossamer.protocol.libp2p.tunnel import Inbound
from gossamer.protocol.messages.frames import to_frame
from gossamer.protocol.streams.admission import Admission, StreamCaps
from gossamer.protocol.streams.transport import Purpose, Stream, StreamHandler
from gossamer.protocol.tasks import cancel
from tests.protocol.peers import chunk, echo, seeded

pytestmark = pytest.mark.real_time

PARTNER, OTHER = seeded(1).peer_id, seeded(2).peer_id


class Control:
    """A p2pd that records the listener for inbound streams."""

    def __init__(self, is_there: bool = True) -> None:
        self.is_there = is_there

    async def receive_streams(self, protocol: str, listener: Path) -> None:
        assert protocol in (outbound.PROTOCOL, bulk.PROTOCOL)
        if not self.is_there:
            raise Unreachable("p2pd has gone")


class World:
    """The receiving side of a peer, and the p2pd that connects streams to it."""

    def __init__(self, stack: AsyncExitStack, handler: StreamHandler = echo, caps: StreamCaps | None = None) -> None:
        self.stack = stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.carried = CarriedBytes()
        self.inbound = Inbound(self.folder / "in.sock", handler, Admission(caps), self.carried)
        self.num_callers = 0

    async def open(self, is_there: bool = True) -> None:
        control: Any = Control(is_there)
        self.serving = await self.stack.enter_async_context(AsyncExitStack())
        await self.serving.enter_async_context(self.inbound.serving(control))

    async def stream_from(self, partner: PeerId) -> Pair:
        """Connect a raw stream of a peer."""
        reader, writer = await asyncio.open_unix_connection(self.folder / "in.sock")
        self.stack.callback(drop, writer)
        await write_pbmsg(writer, p2pd_pb2.StreamInfo(peer=partner.raw, addr=b"\x04\x7f\x00\x00\x01\x06\x00\x01", proto=outbound.PROTOCOL))
        return reader, writer

    async def way_in(self, partner: PeerId) -> Path:
        """Return a Unix socket that forwards one connection of a peer to the server."""
        tasks: set[asyncio.Task[None]] = set()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await splice((reader, writer), await self.stream_from(partner), CarriedBytes())

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.create_task(carry(reader, writer)))

        async def end() -> None:
            await cancel(*tasks)

        self.num_callers += 1
        path = self.folder / f"caller-{self.num_callers}"
        listening = await asyncio.start_unix_server(accept, path)
        self.stack.push_async_callback(end)
        self.stack.callback(listening.close)
        return path

    async def call_from(self, partner: PeerId) -> Any:
        """Start a call of a peer."""
        return (await self.calls_from(partner))()

    async def calls_from(self, partner: PeerId) -> Callable[[], Any]:
        """Return a function that starts calls of a peer on one connection."""
        channel = open_channel(await self.way_in(partner))
        self.stack.push_async_callback(channel.close)
        return lambda: start_call(channel, Purpose.MEET)


@asynccontextmanager
async def receiving(handler: StreamHandler = echo, caps: StreamCaps | None = None) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        world = World(stack, handler, caps)
        await world.open()
        yield world


async def talks(call: Any) -> bool:
    """Send a message; return whether a reply arrives."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(to_frame(chunk(1)))
        return bool(await call.read() == to_frame(chunk(1)))
    return False


async def test_a_call_is_served_as_the_peer_that_p2pd_authenticated() -> None:
    partners: list[PeerId] = []

    async def note(purpose: Purpose, stream: Stream) -> None:
        partners.append(stream.partner)
        await echo(purpose, stream)

    async with receiving(note) as world:
        for partner in (PARTNER, OTHER):
            call = await world.call_from(partner)
            assert await talks(call)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
        assert partners == [PARTNER, OTHER]
        assert world.carried.sent > 0 and world.carried.received > 0


async def test_a_connection_serves_consecutive_calls_of_its_peer() -> None:
    partners: list[PeerId] = []

    async def note(purpose: Purpose, stream: Stream) -> None:
        partners.append(stream.partner)
        await echo(purpose, stream)

    async with receiving(note, StreamCaps(per_purpose=1, per_partner=1, silent=1, total=2)) as world:
        ways = [await world.calls_from(partner) for partner in (PARTNER, OTHER)]
        for start in (*ways, *ways, *ways):
            call = start()
            assert await talks(call)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
        assert partners == 3 * [PARTNER, OTHER]


async def test_a_local_program_that_dials_the_server_is_rejected() -> None:
    async with receiving() as world, grpc.aio.insecure_channel(f"unix:{world.folder / 'grpc.sock'}") as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/Meet")()
        assert not await talks(call)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


class Turned(Exception):
    """A call was rejected because its socket is unknown."""


class Call:
    """The context of a call from this socket address."""

    def __init__(self, caller: str) -> None:
        self.caller = caller

    def peer(self) -> str:
        return self.caller

    async def abort(self, code: grpc.StatusCode, why: str) -> None:
        assert code is grpc.StatusCode.UNAUTHENTICATED
        raise Turned


async def test_the_name_of_a_socket_must_match_exactly() -> None:
    async with receiving() as world:
        assert await talks(await world.call_from(PARTNER))
        name = world.folder / "in-0"
        assert not name.exists(), "another program could take the name"
        for caller in (f"ipv4:127.0.0.1:{name}", f"unix:{name}/", "unix:in-0", "unix:", "", "unix:/"):
            call: Any = Call(caller)
            with pytest.raises(Turned):
                await world.inbound.serve(Purpose.MEET, call)


async def test_a_connection_without_a_call_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.protocol.streams.admission.FIRST_FRAME_S", 0.1)
    async with receiving() as world:
        reader, _ = await world.stream_from(PARTNER)
        assert await reader.read(1 << 16)  # the server's greeting
        assert await reader.read() == b""


async def test_a_stream_without_a_header_or_with_another_type_of_key_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "OPENER_S", 0.1)
    async with receiving() as world:
        stranger: Any = type("Stranger", (), {"raw": b"\x12\x20" + bytes(32)})
        reader, _ = await world.stream_from(stranger)
        assert await reader.read() == b""
        mute, writer = await asyncio.open_unix_connection(world.folder / "in.sock")
        world.stack.callback(drop, writer)
        assert await mute.read() == b""


async def test_closing_cancels_handlers_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "HANDLERS_END_S", 0.1)
    ends: list[str] = []

    async def stubborn(purpose: Purpose, stream: Stream) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    async def polite(purpose: Purpose, stream: Stream) -> None:
        with pytest.raises(PeerGone):
            while True:
                await stream.receive()
        ends.append("over")

    async def either(purpose: Purpose, stream: Stream) -> None:
        await (stubborn if stream.partner == PARTNER else polite)(purpose, stream)

    async with receiving(either) as world:
        for partner in (PARTNER, OTHER):
            call = await world.call_from(partner)
            await accepted(call)
            await call.write(to_frame(chunk(1)))
        await asyncio.sleep(0.1)
        await world.serving.aclose()
        assert ends == ["over", "cancelled"]


async def test_a_missing_p2pd_leaves_nothing_open() -> None:
    async with AsyncExitStack() as stack:
        world = World(stack)
        with pytest.raises(Unreachable):
            await world.open(is_there=False)
        assert not (world.folder / "in.sock").exists()
