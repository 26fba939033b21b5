"""Admission control: one table of a peer's inbound connections, over any transport.

A connection is silent, then in a call, then over; a further call makes it silent again. A silent one is dropped after a timeout,
one whose call is over once no bytes move on it. If the table or the newcomer's network is full, a newcomer replaces the oldest connection
without a call, then the oldest silent or ended one, then a stalled call of the network with the most connections; never an active call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from gossamer.protocol.addresses import network_of, route
from gossamer.protocol.errors import PeerMisbehaved, Refused, TransportError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.streams.transport import Purpose, Stream, StreamHandler

log = logging.getLogger(__name__)

FIRST_FRAME_S = 10.0  # timeout from the connection to its call, and from the call to its first message
LINGER_S = 75.0  # idle timeout of a connection whose call is over: the caller may close it or start another call
LINGER_MOST_S = 300.0  # total timeout of such a connection: the last messages, megabytes on a slow line, may still be in transit
STALLED_S = 10.0  # a call that carried fewer than STALLED_BYTES in this time is stalled
STALLED_BYTES = 1024  # keep-alive pings carry less


@dataclass(frozen=True, slots=True)
class StreamCaps:
    """Limits on simultaneous inbound connections."""

    per_purpose: int = 2  # calls of one partner for one purpose; two, because a retry may overlap the call that it replaces
    per_partner: int = 8  # connections of one partner, including those whose call is over
    silent: int = 2  # connections of a partner that has not sent a message on any of them: identities are free
    per_network: int = 16  # connections from one public network, or through the relays of one: identities are free, networks are not
    total: int = 64


@dataclass(eq=False, slots=True)
class InboundConnection:
    """One inbound connection. Its transport reports each change of state to the table."""

    partner: PeerId
    drop: Callable[[], object]  # ends the connection at once
    carried: Callable[[], int]  # returns the bytes so far, in both directions
    observed: str = ""  # remote multiaddr; empty if unknown
    purpose: Purpose | None = None  # of the current or the last call; None before the first call
    has_sent: bool = False  # the caller has sent a message in this call
    is_over: bool = False  # the call has ended, the connection has not
    deadline: asyncio.TimerHandle | None = None  # drops the connection; None during an active call
    moved: tuple[int, float] = (0, 0.0)  # bytes carried at the last observed progress, and its loop time

    @property
    def is_in_call(self) -> bool:
        """Whether a call has started that is not over."""
        return self.purpose is not None and not self.is_over

    @property
    def network(self) -> str:
        """Return the network to which the limit per network applies; empty for loopback and local-network addresses."""
        return "" if route(self.observed) == "local" else network_of(self.observed)


class Admission:
    """The table of inbound connections. It drops one by removing it and calling its `drop`."""

    def __init__(self, caps: StreamCaps | None = None, is_banned: Callable[[PeerId], bool] = lambda partner: False) -> None:
        self._caps = caps or StreamCaps()
        self._is_banned = is_banned
        # Ordered by the time since which a connection has been silent or over, longest first.
        self._connections: dict[InboundConnection, None] = {}

    def admit(
        self, partner: PeerId, drop: Callable[[], object], carried: Callable[[], int], observed: str = ""
    ) -> InboundConnection | None:
        """Accept a connection, or return None if a ban or a limit forbids it. `drop` ends it; `carried` returns its bytes, both ways."""
        own = [connection for connection in self._connections if connection.partner == partner]
        most = self._caps.per_partner if any(connection.has_sent for connection in own) else self._caps.silent
        connection = InboundConnection(partner, drop, carried, observed, moved=(0, asyncio.get_running_loop().time()))
        if self._is_banned(partner) or len(own) >= most or not self._has_room(connection.network):
            log.info("rejected a connection from %s", partner.short())
            return None
        self._connections[connection] = None
        self._allow(connection, FIRST_FRAME_S)
        return connection

    def begin_call(self, connection: InboundConnection, purpose: Purpose) -> bool:
        """Start a call, whose first message must arrive within FIRST_FRAME_S. Return False if it is not admitted."""
        own = [
            other for other in self._connections if (other.partner, other.purpose) == (connection.partner, purpose) and not other.is_over
        ]
        if (
            connection not in self._connections
            or connection.is_in_call
            or len(own) >= self._caps.per_purpose
            or self._is_banned(connection.partner)
        ):
            return False
        connection.purpose, connection.has_sent, connection.is_over = purpose, False, False
        self._allow(connection, FIRST_FRAME_S)
        return True

    def note_message(self, connection: InboundConnection) -> bool:
        """Record the first message; from now on the call has no timeout. Return False if it was dropped or its partner is banned."""
        self._allow(connection, None)
        connection.has_sent = connection in self._connections and not self._is_banned(connection.partner)
        return connection.has_sent

    def end_call(self, connection: InboundConnection) -> None:
        """Record that the call has ended. The connection is dropped when it is idle for LINGER_S, after LINGER_MOST_S at the latest."""
        if connection in self._connections:
            connection.is_over = True
            self._connections[connection] = self._connections.pop(connection)
            self._linger(connection, asyncio.get_running_loop().time() + LINGER_MOST_S)

    def remove(self, connection: InboundConnection) -> None:
        """Remove a connection that has ended. Idempotent."""
        self._connections.pop(connection, None)
        self._allow(connection, None)

    def is_calling(self, partner: PeerId) -> bool:
        """Return whether a partner has an inbound call open."""
        return any(connection.partner == partner and connection.is_in_call for connection in self._connections)

    def _allow(self, connection: InboundConnection, seconds: float | None) -> None:
        if connection.deadline is not None:
            connection.deadline.cancel()
        connection.deadline = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._drop, connection)

    def _linger(self, connection: InboundConnection, until_s: float) -> None:
        """Drop a connection when it has carried nothing for LINGER_S, and at loop time `until_s` at the latest."""
        before, loop = connection.carried(), asyncio.get_running_loop()

        def look() -> None:
            if connection.carried() == before or loop.time() >= until_s:
                self._drop(connection)
            else:
                self._linger(connection, until_s)

        connection.deadline = loop.call_later(min(LINGER_S, until_s - loop.time()), look)

    def _has_room(self, network: str) -> bool:
        """Return whether a newcomer from this network can be accepted, after dropping another connection if necessary."""
        neighbours = [connection for connection in self._connections if connection.network == network] if network else []
        if len(neighbours) >= self._caps.per_network:
            return self._displace(neighbours)
        return len(self._connections) < self._caps.total or self._displace(list(self._connections))

    def _displace(self, connections: list[InboundConnection]) -> bool:
        """Drop one of these connections, if any may be dropped; return whether one was. A connection without a call goes first."""
        idle = [connection for connection in connections if connection.is_over or not connection.has_sent]
        stalled = [connection for connection in connections if self._is_stalled(connection)]
        if idle:
            self._drop(min(idle, key=lambda connection: connection.purpose is not None))
        elif stalled:
            counts = Counter(connection.network for connection in connections)
            self._drop(max(stalled, key=lambda connection: counts[connection.network]))
        return bool(idle or stalled)

    def _is_stalled(self, connection: InboundConnection) -> bool:
        now_s, carried = asyncio.get_running_loop().time(), connection.carried()
        if carried - connection.moved[0] >= STALLED_BYTES:
            connection.moved = carried, now_s
        return now_s - connection.moved[1] >= STALLED_S

    def _drop(self, connection: InboundConnection) -> None:
        state = "over" if connection.is_over else "stalled" if connection.has_sent else "silent"
        log.info("dropped a connection from %s: it was %s", connection.partner.short(), state)
        self.remove(connection)
        connection.drop()


async def handle(handler: StreamHandler, purpose: Purpose, stream: Stream) -> None:
    """Run a handler, log its error if it fails, and close its stream."""
    try:
        await handler(purpose, stream)
    except (TransportError, PeerMisbehaved, Refused) as error:
        log.info("stream from %s: %s", stream.partner.short(), error)
    except Exception:
        log.exception("the handler of a stream from %s failed", stream.partner.short())
    finally:
        await stream.close()
