"""The gRPC server of a peer: turns each inbound call whose caller is known into a stream for the handler.

Calls come over loopback from `lanes.py`, which knows who is behind them; a caller that it does not know is turned away.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from protocol.identity import PeerId
from protocol.libp2p.grpc_stream import ACCEPTED, BROKEN, Context, GrpcStream, refuse_another, refuse_stranger, start_server
from protocol.streams.admission import Admission, Place, StreamCaps, first_frame, handle
from protocol.streams.transport import Purpose, StreamHandler

HANDLERS_END_S = 2.0


class Register(Protocol):
    """Who is behind a caller's address, and for one call only."""

    def claim(self, caller: str) -> PeerId | None:
        """Return the peer, or None for a stranger."""
        ...

    def heard(self, caller: str) -> None:
        """Tell that a claimed caller has said something."""
        ...

    def release(self, caller: str) -> None:
        """Tell that the call of a claimed caller is over."""
        ...


class Reception:
    """Serves on a loopback port, from `open` to `close`."""

    def __init__(self, handler: StreamHandler, caps: StreamCaps) -> None:
        self._handler = handler
        self._admission = Admission(caps)
        self._handlers: set[asyncio.Task[Any]] = set()

    async def open(self) -> int:
        """Start the server; return its port. Calls are turned away until there is a register (`admit_from`)."""
        self._register: Register | None = None
        self._server, port = await start_server(self._serve)
        return port

    def admit_from(self, register: Register) -> None:
        """Accept the callers in this register."""
        self._register = register

    async def close(self) -> None:
        """End every stream; handlers get PeerGone, and a moment to act on it."""
        await self._server.stop(None)
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=HANDLERS_END_S)
        for task in self._handlers:
            task.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    async def _serve(self, purpose: Purpose, context: Context) -> None:
        caller = context.peer()
        partner = self._register.claim(caller) if self._register else None
        if self._register is None or partner is None:
            await refuse_stranger(context)
        try:
            place = self._admission.enter(partner, purpose)
            if place is None:
                await refuse_another(context)
            try:
                await self._converse(place, context, self._register)
            finally:
                self._admission.leave(place)
        finally:
            self._register.release(caller)

    async def _converse(self, place: Place, context: Context, register: Register) -> None:
        """Live as long as the call: the context must not be touched afterwards."""
        closed = asyncio.Event()
        stream = GrpcStream(place.partner, context.write, lambda _: closed.set())
        try:
            await context.send_initial_metadata(ACCEPTED)
        except BROKEN:  # the caller has gone already
            return
        pump = asyncio.create_task(stream.pump(context.read), name="inbound frames")
        try:
            if await first_frame(stream, place):
                register.heard(context.peer())
                self._hand_over(place.purpose, stream)
                await closed.wait()
        finally:
            stream.end("the connection to the partner broke")
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    def _hand_over(self, purpose: Purpose, stream: GrpcStream) -> None:
        task = asyncio.create_task(handle(self._handler, purpose, stream), name=f"inbound {purpose.value}")
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
