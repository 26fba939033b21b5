"""The libp2p transport: each stream is one gRPC call, in one HTTP/2 connection, in one raw libp2p stream.

    gRPC channel -> our Unix socket -> p2pd ~~ libp2p ~~ p2pd -> our Unix socket -> loopback TCP -> gRPC server

libp2p brings NAT traversal, encryption and the proof of who the partner is; gRPC brings framing, flow control and keep-alive. One
connection per stream: nothing is pooled, and closing a stream frees all of it. This file opens streams; `inbound.py` takes those that
others open.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from protocol.errors import Unreachable
from protocol.identity import PeerId
from protocol.libp2p.grpc_stream import BROKEN, LINGER_S, GrpcStream, accepted, start_call
from protocol.libp2p.inbound import PROTOCOL, Inbound
from protocol.libp2p.p2pd_control import BUFFER_BYTES, Control
from protocol.libp2p.splice import CarriedBytes, Pair, drop, splice
from protocol.streams.admission import Admission
from protocol.streams.transport import Purpose, Stream, StreamHandler

CLOSE_S = 1.0
ACCEPT_S = 10.0


class _Call:
    """One outbound call with all that carries it."""

    def __init__(self, socket: Path, remote: Pair, carried: CarriedBytes) -> None:
        self._socket = socket
        self._remote = remote
        self._carried = carried
        self._splice: asyncio.Task[None] | None = None
        self._listener: asyncio.Server | None = None
        self._channel: Any = None
        self.rpc: Any = None

    async def open(self, purpose: Purpose) -> None:
        """Connect a channel to the libp2p stream, start the call and wait until the partner has accepted it. Raises Unreachable."""
        self._listener = await asyncio.start_unix_server(self._accept, self._socket, limit=BUFFER_BYTES)
        self._channel, self.rpc = start_call(self._socket, purpose)
        try:
            async with asyncio.timeout(ACCEPT_S):
                await accepted(self.rpc)
        except TimeoutError:
            raise Unreachable(f"the partner did not answer within {ACCEPT_S:g} s") from None

    async def close(self) -> None:
        """Drop the call and everything below it, at once."""
        self._stop_listening()
        if self._channel is not None:
            with suppress(*BROKEN):
                self.rpc.cancel()
            await self._channel.close()
        if self._splice is None:
            drop(self._remote[1])
            return
        self._splice.cancel()
        await asyncio.gather(self._splice, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the channel's connection, the only one there will be."""
        if self._splice is not None:
            drop(writer)
            return
        self._stop_listening()
        self._splice = asyncio.create_task(splice((reader, writer), self._remote, self._carried), name="outbound connection")

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._socket.unlink(missing_ok=True)


class TunnelTransport:
    """Streams to and from other peers over one running p2pd. Use as `async with`; one event loop only.

    Leaving it ends every stream: handlers and callers get PeerGone.
    """

    def __init__(self, control: Control, folder: Path, handler: StreamHandler, admission: Admission, carried: CarriedBytes) -> None:
        self._control = control
        self._folder = folder
        self._carried = carried
        self._inbound = Inbound(folder / "in.sock", handler, admission, carried)
        self._closing: set[asyncio.Task[None]] = set()
        self._open: dict[Stream, tuple[_Call, asyncio.Task[None]]] = {}

    async def __aenter__(self) -> Self:
        await self._inbound.open(self._control)
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in list(self._open):
            await stream.close()
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_S)
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._inbound.close()

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        """Open a stream to `partner`; `addresses` are hints (multiaddrs) and may be empty. Raises Unreachable."""
        if addresses and partner not in await self._control.connected():
            with suppress(Unreachable):  # stale hints: p2pd may still find the partner by itself
                await self._control.connect(partner, addresses)
        remote = await self._control.open_stream(partner, PROTOCOL)
        call = _Call(self._folder / f"call-{secrets.token_hex(4)}.sock", remote, self._carried)
        try:
            await call.open(purpose)
        except BaseException:
            await asyncio.shield(self._spawn(call.close()))
            raise
        stream = GrpcStream(partner, call.rpc.write, self._finish)
        self._open[stream] = call, asyncio.create_task(stream.pump(call.rpc.read), name="outbound frames")
        return stream

    def _finish(self, stream: Stream) -> None:
        call, pump = self._open.pop(stream)
        self._spawn(self._wind_up(call, pump))

    async def _wind_up(self, call: _Call, pump: asyncio.Task[None]) -> None:
        """Let what was sent arrive: say that nothing more comes, and wait a while for the partner to end the call."""
        try:
            with suppress(TimeoutError, *BROKEN):
                async with asyncio.timeout(LINGER_S):
                    await call.rpc.done_writing()
                    await pump
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            await call.close()

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task
