"""Outbound calls, each a gRPC channel through one libp2p stream; opening one is dear, so it is kept for a minute for the next call."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gossamer.protocol.addresses import route
from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.bulk import new_token, open_bulk
from gossamer.protocol.libp2p.dialer import Dialer, DirectRoute
from gossamer.protocol.libp2p.grpc_stream import BROKEN, ConnectionEnded, GrpcStream, accepted, ended_well, open_channel, start_call
from gossamer.protocol.libp2p.p2pd import BUFFER_BYTES, Control
from gossamer.protocol.libp2p.splice import CarriedBytes, Pair, drop, splice, wait_while_active
from gossamer.protocol.streams.admission import LINGER_MOST_S, LINGER_S
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import cancel

T = TypeVar("T")

PROTOCOL = "/gossamer/peer/1"
ACCEPT_S = 30.0  # timeout until the partner accepts a call; on a slow line the reply queues behind the windows of other calls
ACCEPT_AGAIN_S = 5.0  # the same on a kept connection, which may have broken silently
KEEP_S = 60.0  # less than the partner's LINGER_S
MAX_KEPT = 16  # connections
MAX_KEPT_OF_ONE = 2  # connections to one partner
CLOSE_S = 1.0  # idle timeout of the calls that end with the transport
CLOSE_MOST_S = 3.0  # total timeout of the same
MAX_CLOSING = 32  # calls that we have ended and the partner has not; beyond it, the oldest is cancelled


class Connection:
    """A gRPC channel to a partner over one libp2p stream, for one call at a time."""

    def __init__(self, partner: PeerId, observed: str, socket: Path, remote: Pair, carried: CarriedBytes) -> None:
        self.partner = partner
        self.observed = observed
        self.carried = CarriedBytes()  # bytes that this connection has carried
        self._socket = socket
        self._remote = remote
        self._carried = carried
        self._splice: asyncio.Task[None] | None = None
        self._listener: asyncio.Server | None = None
        self._channel: Any = None

    @property
    def is_up(self) -> bool:
        """Whether the libp2p stream below is still open, as far as known."""
        return self._splice is not None and not self._splice.done()

    async def call(self, purpose: Purpose, token: bytes, timeout_s: float) -> Any:
        """Start a call named `token` and wait until the partner has accepted it. The first call opens the channel. Raises Unreachable."""
        if self._channel is None:
            await self._open_channel()
        rpc = start_call(self._channel, purpose, token)
        try:
            async with asyncio.timeout(timeout_s):
                await accepted(rpc)
        except TimeoutError:
            raise Unreachable(f"the partner did not accept the call within {timeout_s:g} s") from None
        return rpc

    async def _open_channel(self) -> None:
        try:
            self._listener = await asyncio.start_unix_server(self._accept, self._socket, limit=BUFFER_BYTES)
        except OSError as error:  # a full disk, or too many open files
            raise Unreachable(f"this machine has no socket for the call: {error.strerror}") from error
        self._channel = open_channel(self._socket)

    def drop(self) -> None:
        """Close the libp2p stream at once."""
        self._stop_listening()
        drop(self._remote[1])
        if self._splice is not None:
            self._splice.cancel()

    async def close(self) -> None:
        """Abort the call, and close the channel and the libp2p stream at once. A cancellation does not leave the stream open."""
        self.drop()
        if self._channel is not None:
            await self._channel.close()
        if self._splice is not None:
            await cancel(self._splice)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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


class Outbound:
    """Opens streams to partners. `folder` holds its sockets; `carried` counts the bytes of all connections."""

    def __init__(
        self, control: Control, folder: Path, carried: CarriedBytes, dialer: Dialer | Control, direct_route: DirectRoute | None = None
    ) -> None:
        self._control = control
        self._dialer = dialer
        self._direct_route = direct_route
        self._folder = folder
        self._carried = carried
        self._opening: Counter[PeerId] = Counter()  # calls that are not accepted yet
        self._open: dict[Stream, tuple[Connection, Any, asyncio.Task[None]]] = {}  # with connection, call and reading task
        self._kept: dict[Connection, asyncio.TimerHandle] = {}  # idle connections, oldest first
        self._closing: dict[asyncio.Task[None], PeerId] = {}  # with the partner, oldest first

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        """Open a stream to `partner`. `addresses` are multiaddrs to try and may be empty. Raises Unreachable."""
        await self._leave_relay(partner, addresses)
        self._opening[partner] += 1
        try:
            return await self._begin(partner, addresses, purpose)
        finally:
            self._opening -= Counter([partner])

    async def _begin(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        while (kept := self._take(partner)) is not None:
            with suppress(Unreachable):  # the connection has broken, or the partner has closed it
                return await self._call(kept, purpose, ACCEPT_AGAIN_S)
        try:
            return await self._call(await self._connection(partner, addresses), purpose, ACCEPT_S)
        except ConnectionEnded:  # the partner may have closed the connection as idle before our call reached it
            return await self._call(await self._connection(partner, addresses), purpose, ACCEPT_S)

    def is_calling(self, partner: PeerId) -> bool:
        """Return whether a call of ours to a partner is being opened or is open, or its last messages may still be in transit."""
        is_open = partner in self._opening or any(stream.partner == partner for stream in self._open)
        return is_open or partner in self._closing.values()

    async def close(self) -> None:
        """Close every stream. Messages sent before may still be delivered, within CLOSE_MOST_S."""
        for stream in list(self._open):
            stream.close()
        if self._closing:
            ending = asyncio.wait(list(self._closing))  # a copy: the dict may be empty when the wait begins
            with suppress(TimeoutError):
                await wait_while_active(ending, lambda: self._carried.both, CLOSE_S, CLOSE_MOST_S)
        await cancel(*self._closing)
        for connection in list(self._kept):
            self._discard(connection)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _leave_relay(self, partner: PeerId, addresses: Sequence[str]) -> None:
        """Discard kept relayed connections to a partner that may be reached directly. Raises Unreachable."""
        kept = [one for one in self._kept if one.partner == partner]
        is_relayed = all(route(one.observed) == "relayed" for one in kept)
        if self._direct_route is not None and is_relayed and await self._direct_route.prepare(partner, addresses):
            for one in kept:
                self._discard(one)

    async def _connection(self, partner: PeerId, addresses: Sequence[str]) -> Connection:
        if addresses:
            with suppress(Unreachable):  # the addresses may be stale; the partner may be dialling us
                await self._dialer.connect(partner, addresses)
        remote, address = await self._control.open_stream(partner, PROTOCOL)
        return Connection(partner, address, self._folder / f"call-{secrets.token_hex(4)}.sock", remote, self._carried)

    async def _call(self, connection: Connection, purpose: Purpose, timeout_s: float) -> Stream:
        token = new_token()
        try:
            rpc = await connection.call(purpose, token, timeout_s)
        except BaseException:
            await asyncio.shield(self._close(connection.partner, connection.close()))
            raise
        dial = partial(open_bulk, self._control, connection.partner, token, self._carried)
        stream = GrpcStream(connection.partner, rpc.write, self._finish, connection.observed, dial)
        self._open[stream] = connection, rpc, asyncio.create_task(stream.pump(rpc.read), name="outbound frames")
        return stream

    def _finish(self, stream: Stream) -> None:
        connection, rpc, pump = self._open.pop(stream)
        lingering = [task for task in self._closing if not task.cancelling()]
        for task in _to_go(lingering, MAX_CLOSING):
            task.cancel()
        self._close(connection.partner, self._finish_call(connection, rpc, pump))

    async def _finish_call(self, connection: Connection, rpc: Any, pump: asyncio.Task[None]) -> None:
        """Half-close the call, and wait until the partner ends it, as long as bytes move. Keep the connection if the call ends well."""

        async def end() -> None:
            await rpc.done_writing()
            await pump

        try:
            with suppress(TimeoutError, *BROKEN):
                await wait_while_active(end(), lambda: connection.carried.both, LINGER_S, LINGER_MOST_S)
        finally:
            pump.cancel()
            if connection.is_up and await ended_well(rpc):  # which waits for nothing
                self._keep(connection)
            else:
                await connection.close()
            await cancel(pump)

    def _close(self, partner: PeerId, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="outbound close")
        self._closing[task] = partner
        task.add_done_callback(self._closing.pop)
        return task

    def _keep(self, connection: Connection) -> None:
        own = [one for one in self._kept if one.partner == connection.partner]
        for one in _to_go(own, MAX_KEPT_OF_ONE) or _to_go(list(self._kept), MAX_KEPT):
            self._discard(one)
        self._kept[connection] = asyncio.get_running_loop().call_later(KEEP_S, self._discard, connection)

    def _take(self, partner: PeerId) -> Connection | None:
        """Remove and return the newest kept connection to a partner that is still open, None if there is none."""
        for connection in [one for one in reversed(self._kept) if one.partner == partner]:
            if connection.is_up:
                self._kept.pop(connection).cancel()
                return connection
            self._discard(connection)
        return None

    def _discard(self, connection: Connection) -> None:
        self._kept.pop(connection).cancel()
        connection.drop()  # at once: its task may be cancelled before it begins
        self._close(connection.partner, connection.close())


def _to_go(oldest_first: list[T], most: int) -> list[T]:
    """Return the oldest, without which there is room for one more."""
    return oldest_first[: max(0, len(oldest_first) + 1 - most)]
