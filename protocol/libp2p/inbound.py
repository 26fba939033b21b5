"""What others open to us: p2pd hands over each libp2p stream, and we carry it over loopback to our gRPC server.

The port from which it is carried is the only link between a gRPC call and a proven PeerId. It is known before the server can see the
connection, and serves one call; whoever else dials the server is turned away.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

from protocol.errors import BadMessage
from protocol.libp2p.grpc_stream import ACCEPTED, BROKEN, Context, GrpcStream, refuse_another, refuse_stranger, start_server
from protocol.libp2p.p2pd_control import BUFFER_BYTES, Control, stream_opener
from protocol.libp2p.splice import CarriedBytes, Pair, drop, splice
from protocol.streams.admission import Admission, Visit, handle
from protocol.streams.transport import Purpose, StreamHandler

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
        self._connections: set[asyncio.Task[None]] = set()
        self._handlers: set[asyncio.Task[None]] = set()

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
        try:
            async with asyncio.timeout(OPENER_S):
                partner = await stream_opener(remote[0])
            visit = self._admission.admit(partner, task.cancel)
            if visit is None:
                return
            try:
                await self._connect(visit, remote)
            finally:
                self._admission.end(visit)
        except (OSError, EOFError, BadMessage) as error:
            log.debug("inbound connection: %s", error)

    async def _connect(self, visit: Visit, remote: Pair) -> None:
        with socket.socket() as caller:
            caller.setblocking(False)
            caller.bind(("127.0.0.1", 0))
            port = caller.getsockname()[1]
            self._by_port[port] = visit
            try:
                await asyncio.get_running_loop().sock_connect(caller, ("127.0.0.1", self._port))
                await splice(await asyncio.open_connection(sock=caller, limit=BUFFER_BYTES), remote, self._carried)
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


def _spawn(coroutine: Any, tasks: set[asyncio.Task[None]], name: str) -> asyncio.Task[None]:
    task: asyncio.Task[None] = asyncio.create_task(coroutine, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def _port_of(caller: str) -> int:
    """Return the port in gRPC's "ipv4:127.0.0.1:4711", 0 for anything else."""
    host, _, port = caller.rpartition(":")
    return int(port) if host == "ipv4:127.0.0.1" and port.isdecimal() else 0
