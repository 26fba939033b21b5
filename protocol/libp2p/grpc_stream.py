"""The gRPC service `gossamer.v1.Peer` as streams of messages, with the limits of HTTP/2 (sizes, metadata, keep-alive, no compression).

gRPC only delimits the frames, as bytes. In grpc.aio, using an RPC's context after its coroutine has ended may crash the process. One task
therefore reads for the lifetime of the RPC, and nothing is written after the stream has been marked as ended.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NoReturn

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read at import; strangers can provoke messages, which must not reach stderr
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # not needed: the only child process, p2pd, does not use gRPC

import grpc
import grpc.aio

from gossamer.protocol import limits
from gossamer.protocol.addresses import route
from gossamer.protocol.errors import PeerGone, TransportError, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.streams.transport import Bulk, Inbox, Purpose, Stream

SERVICE: Final = "gossamer.v1.Peer"
METADATA_BYTES: Final = 8 * 1024
FRAMES_AHEAD: Final = 2  # frames read in advance
WINDOW_BYTES: Final = 2 * 1024 * 1024
"""Flow-control window: unread bytes in flight per call and direction. gRPC's own estimate grows with the queueing delay to many megabytes,
which delay all other traffic, including pings. The window allows 168 Mbit/s at a round trip of 100 ms, and takes 8 s at 2 Mbit/s."""
UNWANTED_BYTES: Final = 2 * WINDOW_BYTES  # bytes discarded after `close`: one window in flight, one until the partner is notified

_COMMON: Final[list[tuple[str, int]]] = [
    ("grpc.max_receive_message_length", limits.FRAME_BYTES),
    ("grpc.max_send_message_length", limits.FRAME_BYTES),
    ("grpc.max_metadata_size", METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # identity only: no decompression bombs
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 60_000),  # a ping queues behind the windows of all calls
    ("grpc.http2.ping_timeout_ms", 120_000),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER: Final = [
    *_COMMON,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 2_000),
    ("grpc.max_concurrent_streams", 1),  # one call at a time per connection
    ("grpc.so_reuseport", 0),
]
_CHANNEL: Final = [
    *_COMMON,
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.service_config_disable_resolution", 1),
]

TOKEN: Final = "gossamer-call-bin"  # initial metadata of a call: its name, for its bulk stream
ACCEPTED: Final = (("gossamer", "1"),)  # initial metadata of a call that the server accepts; a rejected or broken call has none
BROKEN: Final = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)  # what grpc.aio raises for an ended stream, by the moment

Context = grpc.aio.ServicerContext[bytes, bytes]
Serve = Callable[[Purpose, Context], Awaitable[None]]


class GrpcStream(Stream):
    """A stream over one RPC, on either side. `on_close` ends the RPC, `dial` opens a bulk stream; the creator runs `pump` in a task."""

    def __init__(
        self,
        partner: PeerId,
        write: Callable[[bytes], Awaitable[None]],
        on_close: Callable[[Stream], None],
        observed: str = "",
        dial: Callable[[], Awaitable[Bulk]] | None = None,
    ) -> None:
        async def send(frame: bytes) -> None:
            try:
                await write(frame)
            except BROKEN as error:
                self.end(_why(error))
                raise PeerGone(_why(error)) from error
            except asyncio.CancelledError:  # it is unknown whether the frame was sent
                self.end("a send was cancelled")
                raise

        super().__init__(partner, route(observed), Inbox(FRAMES_AHEAD), send, on_close, observed, dial)

    def end(self, why: str) -> None:
        """Mark the stream as ended by the partner or the connection. Nothing is written afterwards."""
        self._inbox.end(why)
        if self._bulk is not None:
            self._bulk.close()

    async def pump(self, read: Callable[[], Awaitable[Any]]) -> None:
        """Read frames into the inbox until `read` returns no more; after `close`, discard at most UNWANTED_BYTES."""
        why = "the partner closed the stream"
        unwanted_bytes = 0
        try:
            while unwanted_bytes <= UNWANTED_BYTES and isinstance(frame := await read(), bytes):
                unwanted_bytes += len(frame) if self._inbox.ended is not None else 0
                self._inbox.put(frame)
                await self._inbox.room()
        except BROKEN as error:
            why = _why(error)
        finally:
            self.end(why)


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"the stream broke: {error.code().name.lower()}: {error.details()}"
    return "the stream has ended"


async def start_server(serve: Serve, socket: Path) -> grpc.aio.Server:
    """Start the service on a Unix socket. Each call is passed to `serve` with its purpose. Raises TransportError."""
    server = grpc.aio.server(options=_SERVER)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {item.value: _method(item, serve) for item in Purpose})])
    try:
        server.add_insecure_port(f"unix:{socket}")
    except RuntimeError as error:  # gRPC does not say why
        raise TransportError(f"could not listen on {socket}", hint="check that its disk is not full") from error
    await server.start()
    return server


def _method(purpose: Purpose, serve: Serve) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def run(_: object, context: Context) -> None:
        await serve(purpose, context)

    return grpc.stream_stream_rpc_method_handler(run)


async def refuse_untunneled(context: Context) -> NoReturn:
    """Abort a call from a connection that does not come from our p2pd."""
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this socket accepts calls from its own tunnel only")


async def refuse_excess(context: Context) -> NoReturn:
    """Abort a call that exceeds a limit."""
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many open streams")


def open_channel(socket: Path) -> grpc.aio.Channel:
    """Return a channel to the service on a Unix socket. The first call connects it."""
    return grpc.aio.insecure_channel(f"unix:{socket}", options=_CHANNEL)


def start_call(channel: grpc.aio.Channel, purpose: Purpose, token: bytes = b"") -> Any:
    """Start a call for a purpose, named `token` for its bulk stream. `accepted` waits until the server accepts it."""
    return channel.stream_stream(f"/{SERVICE}/{purpose.value}")(metadata=((TOKEN, token),))


def token_of(context: Context) -> bytes:
    """Return the name that the caller has given its call, empty if none."""
    found = dict(context.invocation_metadata() or ()).get(TOKEN, b"")
    return found if isinstance(found, bytes) else b""


class ConnectionEnded(Unreachable):
    """The connection ended before the partner accepted or rejected the call, as when the partner closes an idle one at that moment."""


async def accepted(call: Any) -> None:
    """Wait until the server has accepted the call. Raises ConnectionEnded, or Unreachable if the call is rejected."""
    try:
        if ACCEPTED[0] in list(await call.initial_metadata()):
            return
        code, details = await call.code(), await call.details()
    except BROKEN as error:
        raise Unreachable(_why(error)) from error
    if code is grpc.StatusCode.UNAVAILABLE:
        raise ConnectionEnded("the connection ended before the partner accepted the call")
    raise Unreachable(f"the partner rejected the stream: {details}")


async def ended_well(call: Any) -> bool:
    """Return whether a call has ended with status OK."""
    return call.done() and await call.code() is grpc.StatusCode.OK
