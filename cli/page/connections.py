"""Limits on the connections of the page's server: uvicorn alone waits without end for the rest of a request, on any number of them."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 10.0  # for a whole request, from its connection or its first byte
MAX_CONNECTIONS = 64  # an open page takes up to seven


class BoundedConnection(H11Protocol):
    """A connection that ends when a request is not whole in time. When all places are taken, the oldest that answers nothing gives way."""

    _deadline: asyncio.TimerHandle | None = None  # ends the connection; None while no part of a request is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place. If every place answers a request, close the connection."""
        super().connection_made(transport)
        held = [other for other in self.connections if isinstance(other, BoundedConnection) and not other.transport.is_closing()]
        if len(held) > MAX_CONNECTIONS:
            min((other for other in held if not other._is_answering), key=BoundedConnection._due_s).transport.abort()
        self._limit()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, and limit the time of the request that they belong to."""
        super().data_received(data)
        self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the place."""
        self._stop()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _due_s(self) -> float:
        """Return when the connection's time ends: a new one, which has none yet, comes last; one that is only kept open, first."""
        return self._deadline.when() if self._deadline else float("inf") if self.cycle is None else 0.0

    def _limit(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
