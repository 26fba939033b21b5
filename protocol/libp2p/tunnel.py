"""The libp2p transport: each stream is one gRPC call on its own HTTP/2 connection, inside one raw libp2p stream.

    gRPC channel -> our Unix socket -> p2pd ~~ libp2p ~~ p2pd -> our Unix sockets -> gRPC server

The server maps a call to an authenticated PeerId only by the name of the Unix socket from which it comes. A name is registered before the
server can accept the connection and never reused, and no other user may enter the folder. Calls from any other socket are aborted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gossamer.protocol.errors import BadMessage
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.bulk import InboundBulk
from gossamer.protocol.libp2p.dialer import Dialer, DirectRoute
from gossamer.protocol.libp2p.grpc_stream import (
    ACCEPTED,
    BROKEN,
    Context,
    GrpcStream,
    refuse_excess,
    refuse_untunneled,
    start_server,
    token_of,
)
from gossamer.protocol.libp2p.outbound import PROTOCOL, Outbound
from gossamer.protocol.libp2p.p2pd import BUFFER_BYTES, Control, read_stream_header, receiving
from gossamer.protocol.libp2p.splice import CarriedBytes, Pair, drop, splice
from gossamer.protocol.streams.admission import Admission, InboundConnection, handle
from gossamer.protocol.streams.transport import Purpose, StreamHandler
from gossamer.protocol.tasks import cancel, spawn

log = logging.getLogger(__name__)

OPENER_S = 10.0  # timeout until p2pd names the peer that opened the stream
HANDLERS_END_S = 2.0  # time that handlers get to end after their streams


class Inbound:
    """Serves inbound streams, which p2pd connects to the Unix socket `listener`. Use as `async with serving(control)`."""

    def __init__(self, listener: Path, handler: StreamHandler, admission: Admission, carried: CarriedBytes) -> None:
        self._listener = listener
        self._server_socket = listener.with_name("grpc.sock")
        self._handler = handler
        self._admission = admission
        self._carried = carried
        self._bulk = InboundBulk(listener.with_name("bulk.sock"))
        self._by_name: dict[str, tuple[InboundConnection, CarriedBytes]] = {}
        self._names = itertools.count()
        self._connections: set[asyncio.Task[None]] = set()
        self._handlers: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self, control: Control) -> AsyncIterator[None]:
        """Serve, then end every stream: handlers get PeerGone, and are cancelled after HANDLERS_END_S. Raises Unreachable without p2pd."""
        self._server_socket.unlink(missing_ok=True)
        server = await start_server(self.serve, self._server_socket)
        try:
            async with receiving(control, PROTOCOL, self._listener, self._accept), self._bulk.serving(control):
                yield
        finally:
            await server.stop(None)
            if self._handlers:
                await asyncio.wait(self._handlers, timeout=HANDLERS_END_S)
            await cancel(*self._handlers, *self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = spawn(self._carry((reader, writer)), self._connections, "inbound connection")
        task.add_done_callback(lambda _: drop(writer))

    async def _carry(self, remote: Pair) -> None:
        """Read who opened a libp2p stream, admit the connection, and forward it to the gRPC server until it ends."""
        task = asyncio.current_task()
        assert task is not None
        carried = CarriedBytes()
        try:
            async with asyncio.timeout(OPENER_S):
                partner, observed = await read_stream_header(remote[0])
            connection = self._admission.admit(partner, task.cancel, lambda: carried.both, observed)
            if connection is None:
                return
            try:
                await self._connect(connection, remote, carried)
            finally:
                self._admission.remove(connection)
        except (OSError, EOFError, BadMessage) as error:
            log.debug("inbound connection: %s", error)

    async def _connect(self, connection: InboundConnection, remote: Pair, carried: CarriedBytes) -> None:
        path = self._listener.with_name(f"in-{next(self._names):x}")
        name = str(path)
        with socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)
            caller.bind(name)
            self._by_name[name] = connection, carried
            try:
                await asyncio.get_running_loop().sock_connect(caller, str(self._server_socket))
                path.unlink()  # a connected socket keeps its name
                local = await asyncio.open_unix_connection(sock=caller.dup(), limit=BUFFER_BYTES)
                await splice(local, remote, carried, self._carried)
            finally:
                path.unlink(missing_ok=True)
                del self._by_name[name]

    async def serve(self, purpose: Purpose, context: Context) -> None:
        """Serve one gRPC call, or abort it if it does not come from an admitted connection."""
        found = self._by_name.get(context.peer().removeprefix("unix:"))
        if found is None:
            await refuse_untunneled(context)
        connection, carried = found
        if not self._admission.begin_call(connection, purpose):
            await refuse_excess(context)
        try:
            await self._converse(connection, carried, purpose, context)
        finally:
            self._admission.end_call(connection)

    async def _converse(self, connection: InboundConnection, carried: CarriedBytes, purpose: Purpose, context: Context) -> None:
        """Run until the call ends: its context must not be used afterwards."""
        closed = asyncio.Event()
        stream = GrpcStream(connection.partner, context.write, lambda _: closed.set(), connection.observed)
        with self._bulk.expecting(token_of(context), stream, carried, self._carried):
            try:
                await context.send_initial_metadata(ACCEPTED)
            except BROKEN:  # the caller has ended the call already
                return
            await self._serve_call(connection, purpose, stream, closed, context)

    async def _serve_call(
        self, connection: InboundConnection, purpose: Purpose, stream: GrpcStream, closed: asyncio.Event, context: Context
    ) -> None:
        pump = asyncio.create_task(stream.pump(context.read), name="inbound frames")
        try:
            if await stream.wait_for_message() and self._admission.note_message(connection):
                spawn(handle(self._handler, purpose, stream), self._handlers, f"inbound {purpose.value}")
                await closed.wait()
        finally:
            stream.end("the connection to the partner broke")
            await cancel(pump)


@asynccontextmanager
async def tunnel_transport(
    control: Control, folder: Path, handler: StreamHandler, admission: Admission, carried: CarriedBytes, dialer: Dialer | None = None
) -> AsyncIterator[Outbound]:
    """Open the Transport over one p2pd. Leaving it ends every stream. Without `dialer`, every address may be dialled."""

    def is_busy(partner: PeerId) -> bool:
        return outbound.is_calling(partner) or admission.is_calling(partner)

    direct_route = DirectRoute(control, dialer, is_busy) if dialer else None
    outbound = Outbound(control, folder, carried, dialer or control, direct_route)
    async with Inbound(folder / "in.sock", handler, admission, carried).serving(control):
        try:
            yield outbound
        finally:
            await outbound.close()
