"""Bulk streams: raw libp2p streams beside the calls, for answers that are too large for chunks of gRPC.

The caller of a `Fetch` call names the call by a token in its metadata. When it wants large answers, it opens a libp2p stream over the same
connection and sends the token; the other side answers with READY. From then on the call carries the signed messages, and the bulk stream
the bytes of each answer larger than a chunk, without gRPC, protobuf or splice. It belongs to one call and ends with it.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, cast

from gossamer.protocol.errors import BadMessage, PeerGone, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.grpc_stream import GrpcStream
from gossamer.protocol.libp2p.p2pd import Control, read_stream_header, receiving
from gossamer.protocol.libp2p.splice import CarriedBytes, Pair, drop
from gossamer.protocol.tasks import cancel, spawn

PROTOCOL: Final = "/gossamer/bulk/1"
TOKEN_BYTES: Final = 16
READY: Final = b"\x01"
OPEN_S: Final = 10.0  # timeout of each side for the token and READY
SOCKET_BYTES: Final = 1 << 20  # of buffer in the kernel, to and from p2pd


class BulkStream(asyncio.BufferedProtocol):
    """One end of a bulk stream. One task may send and another one receive. Bytes are read only while `receive_into` waits for them."""

    def __init__(self, remote: Pair, *carried: CarriedBytes) -> None:
        """Take over a connection to p2pd. `carried`: counts the bytes."""
        self._transport = cast(asyncio.Transport, remote[1].transport)
        self._remote = remote  # its reader and writer must live as long as the connection
        self.carried = carried
        self._target = memoryview(b"")
        self._received: asyncio.Future[None] | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._why = ""  # it ended
        _enlarge(self._transport)
        self._transport.pause_reading()
        self._transport.set_protocol(self)

    async def send(self, data: memoryview) -> None:
        """Send bytes. Wait while p2pd takes no more. Raises PeerGone. After a cancellation the stream cannot be used."""
        self._need_open()
        for count in self.carried:
            count.sent += len(data)
        self._transport.write(data)
        await self._has_room.wait()
        self._need_open()

    async def receive_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes. Raises PeerGone. After a cancellation the stream cannot be used."""
        self._need_open()
        self._target, self._received = target, asyncio.get_running_loop().create_future()
        self._transport.resume_reading()
        try:
            await self._received
        finally:
            self._received = None
        for count in self.carried:
            count.received += len(target)

    def close(self) -> None:
        """End it at once, on both sides. Idempotent."""
        self._end("this side closed the bulk stream")
        if not self._transport.is_closing():
            self._transport.abort()

    def _need_open(self) -> None:
        if self._why:
            raise PeerGone(self._why)

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._has_room.set()
        if self._received is not None and not self._received.done():
            self._received.set_exception(PeerGone(self._why))

    # ------------------------------------------------------------------ called by the event loop

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes belong."""
        return self._target

    def buffer_updated(self, nbytes: int) -> None:
        """Count bytes that have been read."""
        self._target = self._target[nbytes:]
        if not self._target:
            self._transport.pause_reading()
            if self._received is not None and not self._received.done():
                self._received.set_result(None)

    def pause_writing(self) -> None:
        """Have `send` wait."""
        self._has_room.clear()

    def resume_writing(self) -> None:
        """Have `send` go on."""
        self._has_room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """End `send` and `receive_into`."""
        self._end("the partner closed the bulk stream")


def _enlarge(transport: asyncio.Transport) -> None:
    with socket.socket(fileno=socket.dup(transport.get_extra_info("socket").fileno())) as shared:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            shared.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)


async def open_bulk(control: Control, partner: PeerId, token: bytes, *carried: CarriedBytes) -> BulkStream:
    """Open the bulk stream of a call to `partner`. Raises Unreachable, also for a partner that has none."""
    remote, _ = await control.open_stream(partner, PROTOCOL)
    try:
        bulk = BulkStream(remote)  # reads READY itself: a reader of its own would also take bytes that follow at once
        remote[1].write(token)
        ready = bytearray(len(READY))
        async with asyncio.timeout(OPEN_S):
            await bulk.receive_into(memoryview(ready))
        if ready != READY:
            raise Unreachable("the partner does not know this bulk stream")
        bulk.carried = carried
        return bulk
    except BaseException as error:
        drop(remote[1])
        if isinstance(error, OSError | PeerGone):  # TimeoutError is an OSError
            raise Unreachable("the partner accepts no bulk stream") from error
        raise


def new_token() -> bytes:
    """Return a random name of a call."""
    return secrets.token_bytes(TOKEN_BYTES)


class InboundBulk:
    """Attaches inbound bulk streams to the calls for which they are meant. A call has one at most."""

    def __init__(self, listener: Path) -> None:
        self._listener = listener
        self._calls: dict[tuple[PeerId, bytes], tuple[GrpcStream, tuple[CarriedBytes, ...]]] = {}  # without a bulk stream so far
        self._opening = Counter[PeerId]()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self, control: Control) -> AsyncIterator[None]:
        """Accept bulk streams inside the context. Raises Unreachable without p2pd."""
        async with receiving(control, PROTOCOL, self._listener, self._accept):
            try:
                yield
            finally:
                await cancel(*self._tasks)

    @contextmanager
    def expecting(self, token: bytes, stream: GrpcStream, *carried: CarriedBytes) -> Iterator[None]:
        """Attach the bulk stream that names this token to an inbound call, inside the context."""
        key = (stream.partner, token)
        if len(token) == TOKEN_BYTES:
            self._calls.setdefault(key, (stream, carried))
        try:
            yield
        finally:
            if self._calls.get(key) == (stream, carried):
                del self._calls[key]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        spawn(self._attach((reader, writer)), self._tasks, "inbound bulk stream")

    async def _attach(self, remote: Pair) -> None:
        """Read who opened a bulk stream, and for which call."""
        try:
            async with asyncio.timeout(OPEN_S):
                partner, _ = await read_stream_header(remote[0])
                with self._place(partner):
                    token = await remote[0].readexactly(TOKEN_BYTES)
                stream, carried = self._calls.pop((partner, token))
            bulk = BulkStream(remote, *carried)
        except (OSError, EOFError, BadMessage, TimeoutError, KeyError):
            drop(remote[1])
        except BaseException:
            drop(remote[1])
            raise
        else:
            stream.attach(bulk)
            remote[1].write(READY)

    @contextmanager
    def _place(self, partner: PeerId) -> Iterator[None]:
        """Hold a place for a partner that names its call. It has one for each call without a bulk stream. Raises BadMessage."""
        if self._opening[partner] >= sum(caller == partner for caller, _ in self._calls):
            raise BadMessage("more bulk streams than calls")
        self._opening[partner] += 1
        try:
            yield
        finally:
            self._opening[partner] -= 1
            self._opening += Counter()  # forgets who opens none
