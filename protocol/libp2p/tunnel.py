"""The libp2p transport: each stream is one gRPC call, in one HTTP/2 connection, in one raw libp2p stream.

    gRPC channel -> our Unix socket -> p2pd ~~ libp2p ~~ p2pd -> our Unix socket -> loopback TCP -> gRPC server

libp2p brings NAT traversal, encryption and the proof of who the partner is; gRPC brings framing, flow control and keep-alive. One
connection per stream: nothing is pooled, and closing a stream frees all of it.

The loopback port from which an inbound stream is carried is the only link between its gRPC call and a proven PeerId. It is known
before the server can see the connection, and serves one call; whoever else dials the server is turned away.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from protocol.errors import BadMessage, Unreachable
from protocol.identity import PeerId
from protocol.libp2p.grpc_stream import (
    ACCEPTED,
    BROKEN,
    Context,
    GrpcStream,
    accepted,
    refuse_another,
    refuse_stranger,
    start_call,
    start_server,
)
from protocol.libp2p.p2pd import BUFFER_BYTES, Control, stream_opener
from protocol.libp2p.splice import CarriedBytes, Pair, drop, splice, while_moving
from protocol.streams.admission import LINGER_MOST_S, LINGER_S, Admission, Visit, handle
from protocol.streams.transport import Purpose, Stream, StreamHandler

log = logging.getLogger(__name__)

PROTOCOL = "/gossamer/peer/1"
OPENER_S = 10.0  # for p2pd to say whose stream it is
HANDLERS_END_S = 2.0


class Inbound:
    """Serves the streams that p2pd hands over at the Unix socket `listener`, from `open` to `close`."""

    def __init__(self, listener: Path, handler: StreamHandler, admission: Admission, carried: CarriedBytes) -> None:
        self._listener = listener
        self._handler = handler
        self._admission = admission
        self._carried = carried
        self._listening: asyncio.Server | None = None
        self._by_port: dict[int, Visit] = {}  # whose call has not come yet
        self._connections: dict[asyncio.Task[None], None] = {}
        self._handlers: dict[asyncio.Task[None], None] = {}

    async def open(self, control: Control) -> None:
        """Start the server, listen, and tell p2pd where. Raises Unreachable when p2pd has gone."""
        self._server, self._port = await start_server(self.serve)
        try:
            self._listener.unlink(missing_ok=True)
            self._listening = await asyncio.start_unix_server(self._accept, self._listener, limit=BUFFER_BYTES)
            await control.receive_streams(PROTOCOL, self._listener)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End every stream; handlers get PeerGone, and a moment to act on it."""
        if self._listening is not None:
            self._listening.close()
        await self._server.stop(None)
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=HANDLERS_END_S)
        self._listener.unlink(missing_ok=True)
        tasks = [*self._handlers, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- connections ----

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = _spawn(self._carry((reader, writer)), self._connections, "inbound connection")
        task.add_done_callback(lambda _: drop(writer))

    async def _carry(self, remote: Pair) -> None:
        """Carry one connection to the server, from p2pd's first word to its end."""
        task = asyncio.current_task()
        assert task is not None
        carried = CarriedBytes()
        try:
            async with asyncio.timeout(OPENER_S):
                partner = await stream_opener(remote[0])
            visit = self._admission.admit(partner, task.cancel, lambda: carried.both)
            if visit is None:
                return
            try:
                await self._connect(visit, remote, carried)
            finally:
                self._admission.end(visit)
        except (OSError, EOFError, BadMessage) as error:
            log.debug("inbound connection: %s", error)

    async def _connect(self, visit: Visit, remote: Pair, carried: CarriedBytes) -> None:
        with socket.socket() as caller:
            caller.setblocking(False)
            caller.bind(("127.0.0.1", 0))
            port = caller.getsockname()[1]
            self._by_port[port] = visit
            try:
                await asyncio.get_running_loop().sock_connect(caller, ("127.0.0.1", self._port))
                await splice(await asyncio.open_connection(sock=caller, limit=BUFFER_BYTES), remote, carried, self._carried)
            finally:
                if self._by_port.get(port) is visit:
                    del self._by_port[port]

    # ---- calls ----

    async def serve(self, purpose: Purpose, context: Context) -> None:
        """Serve one call that has reached the server, if it came by one of our connections."""
        visit = self._by_port.pop(_port_of(context.peer()), None)
        if visit is None:
            await refuse_stranger(context)
        try:
            if not self._admission.begin(visit, purpose):
                await refuse_another(context)
            await self._converse(visit, purpose, context)
        finally:
            self._admission.over(visit)

    async def _converse(self, visit: Visit, purpose: Purpose, context: Context) -> None:
        """Live as long as the call: the context must not be touched afterwards."""
        closed = asyncio.Event()
        stream = GrpcStream(visit.partner, context.write, lambda _: closed.set())
        try:
            await context.send_initial_metadata(ACCEPTED)
        except BROKEN:  # the caller has gone already
            return
        pump = asyncio.create_task(stream.pump(context.read), name="inbound frames")
        try:
            if await stream.arrived() and self._admission.heard(visit):
                _spawn(handle(self._handler, purpose, stream), self._handlers, f"inbound {purpose.value}")
                await closed.wait()
        finally:
            stream.end("the connection to the partner broke")
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)


def _spawn(coroutine: Any, tasks: dict[asyncio.Task[None], None], name: str) -> asyncio.Task[None]:
    """Start a task; until it has ended it stands in `tasks`, the oldest first."""
    task: asyncio.Task[None] = asyncio.create_task(coroutine, name=name)
    tasks[task] = None
    task.add_done_callback(tasks.pop)
    return task


def _port_of(caller: str) -> int:
    """Return the port in gRPC's "ipv4:127.0.0.1:4711", 0 for anything else."""
    host, _, port = caller.rpartition(":")
    return int(port) if host == "ipv4:127.0.0.1" and port.isdecimal() else 0


CLOSE_S = 1.0  # at the end of the transport, without a byte carried
CLOSE_MOST_S = 3.0
MAX_CLOSING = 32  # calls that we have ended and the partner has not; the oldest gives way
ACCEPT_S = 30.0  # the answer may wait behind a window or two of others on a slow line


class _Call:
    """One outbound call with all that carries it."""

    def __init__(self, socket: Path, remote: Pair, carried: CarriedBytes) -> None:
        self._socket = socket
        self._remote = remote
        self.carried = CarriedBytes()
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
        copying = splice((reader, writer), self._remote, self.carried, self._carried)
        self._splice = asyncio.create_task(copying, name="outbound connection")

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
        self._closing: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._open: dict[Stream, tuple[_Call, asyncio.Task[None]]] = {}

    async def __aenter__(self) -> Self:
        await self._inbound.open(self._control)
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in list(self._open):
            await stream.close()
        if self._closing:
            with suppress(TimeoutError):
                await while_moving(asyncio.wait(self._closing), lambda: self._carried.both, CLOSE_S, CLOSE_MOST_S)
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
            await asyncio.shield(_spawn(call.close(), self._closing, "outbound close"))
            raise
        stream = GrpcStream(partner, call.rpc.write, self._finish)
        self._open[stream] = call, asyncio.create_task(stream.pump(call.rpc.read), name="outbound frames")
        return stream

    def _finish(self, stream: Stream) -> None:
        call, pump = self._open.pop(stream)
        lingering = [task for task in self._closing if not task.cancelling()]
        for task in lingering[: len(lingering) + 1 - MAX_CLOSING]:
            task.cancel()
        _spawn(self._wind_up(call, pump), self._closing, "outbound wind-up")

    async def _wind_up(self, call: _Call, pump: asyncio.Task[None]) -> None:
        """Let what was sent arrive: say that nothing more comes, and wait for the partner to end the call while anything moves."""

        async def end() -> None:
            await call.rpc.done_writing()
            await pump

        try:
            with suppress(TimeoutError, *BROKEN):
                await while_moving(end(), lambda: call.carried.both, LINGER_S, LINGER_MOST_S)
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            await call.close()
