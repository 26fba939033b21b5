"""The gRPC service `gossamer.v1.Peer` as streams of messages, whatever carries its HTTP/2 connection.

Frames pass as bytes through generic handlers: `protocol/messages/frames.py` makes and reads them, and gRPC only delimits them. Here are the
caps and clocks of HTTP/2 (size, metadata, keep-alive, no compression); who the partner is, is told by what carries the connection.

A rule of grpc.aio holds this file together: after an RPC's coroutine has ended, touching its context may crash the process. So
one task reads for as long as the RPC lives, and nothing is written once the stream has been marked as ended.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NoReturn

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read at import; what strangers can provoke is for our log, not for stderr
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # p2pd is started beside running calls; it never uses gRPC

import grpc
import grpc.aio

from gossamer.protocol import limits
from gossamer.protocol.addresses import route
from gossamer.protocol.errors import PeerGone, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.streams.transport import Inbox, Purpose, Stream

SERVICE: Final = "gossamer.v1.Peer"
METADATA_BYTES: Final = 8 * 1024
FRAMES_AHEAD: Final = 2  # read before they are asked for
WINDOW_BYTES: Final = 2 * 1024 * 1024
"""What may be under way, unread, in one call each way. gRPC would measure it by the delay, which grows with what fills the line: to many
megabytes, behind which everything else waits, pings too. 168 Mbit/s at a round trip of 100 ms; 8 s at 2 Mbit/s."""
UNWANTED_BYTES: Final = 2 * WINDOW_BYTES  # a window while we close, another until the partner hears of it

_COMMON: Final[list[tuple[str, int]]] = [
    ("grpc.max_receive_message_length", limits.FRAME_BYTES),
    ("grpc.max_send_message_length", limits.FRAME_BYTES),
    ("grpc.max_metadata_size", METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # identity only: no decompression bombs
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 60_000),  # a ping waits its turn behind all windows that fill a line
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
    ("grpc.max_concurrent_streams", 1),  # a connection is one stream at a time
    ("grpc.so_reuseport", 0),
]
_CHANNEL: Final = [
    *_COMMON,
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.service_config_disable_resolution", 1),
]

ACCEPTED: Final = (("gossamer", "1"),)
"""Initial metadata of a call that the server lets in; a refused or broken one has none."""
BROKEN: Final = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What grpc.aio raises when a stream is over. Depending on when it finds out, it is any of these."""


Context = grpc.aio.ServicerContext[bytes, bytes]
Serve = Callable[[Purpose, Context], Awaitable[None]]


class GrpcStream(Stream):
    """A stream over one RPC, the same on both sides.

    `write` sends a frame; `on_close` is called once, with the stream, and ends the RPC in its own time. Whoever makes the stream runs
    `pump` beside it.
    """

    def __init__(
        self, partner: PeerId, write: Callable[[bytes], Awaitable[None]], on_close: Callable[[Stream], None], observed: str = ""
    ) -> None:
        async def send(frame: bytes) -> None:
            try:
                await write(frame)
            except BROKEN as error:
                self.end(_why(error))
                raise PeerGone(_why(error)) from error
            except asyncio.CancelledError:  # whether the frame went out, nobody knows
                self.end("a send was cancelled")
                raise

        super().__init__(partner, route(observed), Inbox(FRAMES_AHEAD), send, on_close, observed)

    def end(self, why: str) -> None:
        """Mark the stream as ended by the other side or by what carries it: nothing is written any more."""
        self._inbox.end(why)

    async def pump(self, read: Callable[[], Awaitable[Any]]) -> None:
        """Read frames into the inbox until `read` returns none.

        After `close` they are thrown away, as many as can have been under way: a partner that hears of it stops.
        """
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
    return "the stream is over"


async def start_server(serve: Serve, socket: Path) -> grpc.aio.Server:
    """Start the service at a Unix socket; every call, with its purpose, goes to `serve`."""
    server = grpc.aio.server(options=_SERVER)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {item.value: _method(item, serve) for item in Purpose})])
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    return server


def _method(purpose: Purpose, serve: Serve) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def run(_: object, context: Context) -> None:
        await serve(purpose, context)

    return grpc.stream_stream_rpc_method_handler(run)


async def refuse_stranger(context: Context) -> NoReturn:
    """End a call that came by no connection of ours."""
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this socket takes calls from its own tunnel only")


async def refuse_another(context: Context) -> NoReturn:
    """End a call that is one too many."""
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "as many streams are open as I allow")


def open_channel(socket: Path) -> grpc.aio.Channel:
    """Make a channel to the service behind a Unix socket; the first call connects it."""
    return grpc.aio.insecure_channel(f"unix:{socket}", options=_CHANNEL)


def start_call(channel: grpc.aio.Channel, purpose: Purpose) -> Any:
    """Start the call for a purpose; `accepted` tells how that went."""
    return channel.stream_stream(f"/{SERVICE}/{purpose.value}")()


async def accepted(call: Any) -> None:
    """Wait until the server has let the call in. Raises Unreachable."""
    try:
        if ACCEPTED[0] not in list(await call.initial_metadata()):
            raise Unreachable(f"the partner turned the stream away: {await call.details()}")
    except BROKEN as error:
        raise Unreachable(_why(error)) from error


async def ended_well(call: Any) -> bool:
    """Return whether a call is over, and nothing went wrong with it."""
    return call.done() and await call.code() is grpc.StatusCode.OK
