"""Admission control: one table of a peer's inbound connections, over any transport.

A connection is silent, then in a call, then over; a further call makes it silent again. A silent one is dropped after a timeout,
one whose call is over once no bytes move on it. If the table or the newcomer's network is full, a newcomer replaces the oldest connection
without a call, then the oldest silent or ended one, then a slow call of the network with the most connections; never an active call.
Strangers leave some places to partners that this peer has met, and strangers of one network share an allowance of calls. A connection that
a stranger has opened is a partner's once it is one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from gossamer.protocol.addresses import network_of, route
from gossamer.protocol.budgets import Allowance, Budgets
from gossamer.protocol.errors import PeerMisbehaved, Refused, TransportError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import SLOWEST_BYTES_PER_S
from gossamer.protocol.streams.transport import Purpose, Stream, StreamHandler
from gossamer.protocol.tasks import loop_s

log = logging.getLogger(__name__)

FIRST_FRAME_S = 10.0  # timeout from the connection to its call, and from the call to its first message
LINGER_S = 75.0  # idle timeout of a connection whose call is over: the caller may close it or start another call
LINGER_MOST_S = 300.0  # total timeout of such a connection: the last messages, megabytes on a slow line, may still be in transit
STALLED_S = 10.0  # a call that carried fewer than STALLED_BYTES in this time is slow
STALLED_BYTES = 1024  # keep-alive pings carry less
LEAST_RATE_S = 30.0  # after this time a call is slow, too, if its mean rate since is below LEAST_RATE: it may wait before its payload
LEAST_RATE = SLOWEST_BYTES_PER_S / 8  # bytes per second: to hold 48 places costs their holder 1.6 Mbit/s
MOST_REFUSED = 3  # calls in a row on one connection: a refusal is in no budget, and callers hang up after the first one
CALLS_FROM_ONE = Allowance(240, 60.0)  # of the strangers of a network, or of one partner that was met or is local; 8 ms of processor each
CALLS_FROM_STRANGERS = Allowance(1200, 60.0)
CALLS_FROM_MET = Allowance(2400, 60.0)


@dataclass(frozen=True, slots=True)
class StreamCaps:
    """Limits on simultaneous inbound connections."""

    per_purpose: int = 2  # calls of one partner for one purpose; two, because a retry may overlap the call that it replaces
    per_partner: int = 8  # connections of one partner, including those whose call is over
    silent: int = 2  # connections of a partner that has not sent a message on any of them: identities are free
    per_network: int = 16  # connections from one public network, or through the relays of one: identities are free, networks are not
    strangers: int = 48  # connections of peers that this peer has not met: the rest of the total is kept for those that it has
    total: int = 64


@dataclass(eq=False, slots=True)
class InboundConnection:
    """One inbound connection. Its transport reports each change of state to the table."""

    partner: PeerId
    drop: Callable[[], object]  # ends the connection at once
    carried: Callable[[], int]  # returns the bytes so far, in both directions
    observed: str = ""  # remote multiaddr; empty if unknown
    is_met: bool = False  # this peer has completed a meeting, or enough hops, with the partner
    purpose: Purpose | None = None  # of the current or the last call; None before the first call
    has_sent: bool = False  # the caller has sent a message in this call
    is_over: bool = False  # the call has ended, the connection has not
    refused: int = 0  # calls in a row
    deadline: asyncio.TimerHandle | None = None  # drops the connection; None during an active call
    moved: tuple[int, float] = (0, 0.0)  # bytes carried at the last observed progress, and its loop time
    begun: tuple[int, float] = (0, 0.0)  # the same at the start of the call

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

    def __init__(
        self,
        caps: StreamCaps | None = None,
        is_banned: Callable[[PeerId], bool] = lambda partner: False,
        has_met: Callable[[PeerId], bool] = lambda partner: False,
    ) -> None:
        self._caps = caps or StreamCaps()
        self._is_banned = is_banned
        self._has_met = has_met
        self._of_strangers = Budgets(loop_s, CALLS_FROM_STRANGERS, CALLS_FROM_ONE)
        self._of_met = Budgets(loop_s, CALLS_FROM_MET, CALLS_FROM_ONE)
        # Ordered by the time since which a connection has been silent or over, longest first.
        self._connections: dict[InboundConnection, None] = {}

    def admit(
        self, partner: PeerId, drop: Callable[[], object], carried: Callable[[], int], observed: str = ""
    ) -> InboundConnection | None:
        """Accept a connection, or return None if a ban or a limit forbids it. `drop` ends it; `carried` returns its bytes, both ways."""
        own = [connection for connection in self._connections if connection.partner == partner]
        most = self._caps.per_partner if any(connection.has_sent for connection in own) else self._caps.silent
        connection = InboundConnection(partner, drop, carried, observed, moved=(0, loop_s()))
        if self._is_banned(partner) or len(own) >= most or not self._may_call(connection) or not self._has_room(connection):
            log.info("rejected a connection from %s", partner.short())
            return None
        self._connections[connection] = None
        self._allow(connection, FIRST_FRAME_S)
        return connection

    def begin_call(self, connection: InboundConnection, purpose: Purpose) -> bool:
        """Start a call, whose first message must arrive within FIRST_FRAME_S. Return False if it is not admitted."""
        if not self._may_begin(connection, purpose):
            connection.refused += 1
            if connection.refused > MOST_REFUSED and connection in self._connections:
                self._drop(connection)
            return False
        connection.purpose, connection.has_sent, connection.is_over, connection.refused = purpose, False, False, 0
        connection.begun = connection.carried(), loop_s()
        self._allow(connection, FIRST_FRAME_S)
        return True

    def _may_begin(self, connection: InboundConnection, purpose: Purpose) -> bool:
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
        return connection.purpose is None or self._may_call(connection)  # the first call was counted with its connection

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
            self._linger(connection, loop_s() + LINGER_MOST_S)

    def remove(self, connection: InboundConnection) -> None:
        """Remove a connection that has ended. Idempotent."""
        self._connections.pop(connection, None)
        self._allow(connection, None)

    def is_calling(self, partner: PeerId) -> bool:
        """Return whether a partner has an inbound call open."""
        return any(connection.partner == partner and connection.is_in_call for connection in self._connections)

    def is_useless(self, partner: PeerId) -> bool:
        """Return whether every call of a partner is slower than LEAST_RATE over its life."""
        return all(
            _is_below_rate(connection) for connection in self._connections if connection.partner == partner and connection.is_in_call
        )

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

        self._allow(connection, None)  # a call without a message still has its timeout
        connection.deadline = loop.call_later(min(LINGER_S, until_s - loop.time()), look)

    def _may_call(self, connection: InboundConnection) -> bool:
        """Count a call against the allowances; return False if one is used up."""
        connection.is_met = self._has_met(connection.partner)
        budgets = self._of_met if connection.is_met else self._of_strangers
        return budgets.take(1, connection.partner if connection.is_met or not connection.network else connection.network)

    def _has_room(self, newcomer: InboundConnection) -> bool:
        """Return whether a newcomer can be accepted, after dropping another connection if necessary."""
        for connection in self._connections:
            connection.is_met = self._has_met(connection.partner)
        alike = [connection for connection in self._connections if connection.is_met is newcomer.is_met]
        neighbours = [connection for connection in alike if connection.network == newcomer.network] if newcomer.network else []
        if len(neighbours) >= self._caps.per_network:
            return self._displace(neighbours)
        if not newcomer.is_met and len(alike) >= self._caps.strangers:
            return self._displace(alike)
        strangers = [connection for connection in self._connections if not connection.is_met]
        return len(self._connections) < self._caps.total or self._displace(strangers) or self._displace(list(self._connections))

    def _displace(self, connections: list[InboundConnection]) -> bool:
        """Drop one of these connections, if any may be dropped; return whether one was. A connection without a call goes first."""
        idle = [connection for connection in connections if connection.is_over or not connection.has_sent]
        slow = [connection for connection in connections if self._is_slow(connection)]
        if idle:
            self._drop(min(idle, key=lambda connection: connection.purpose is not None))
        elif slow:
            counts = Counter(connection.network for connection in connections)
            self._drop(max(slow, key=lambda connection: counts[connection.network]))
        return bool(idle or slow)

    def _is_slow(self, connection: InboundConnection) -> bool:
        """Return whether a call has stalled, or has been slower than LEAST_RATE over its life."""
        now_s, carried = loop_s(), connection.carried()
        if carried - connection.moved[0] >= STALLED_BYTES:
            connection.moved = carried, now_s
        return now_s - connection.moved[1] >= STALLED_S or _is_below_rate(connection)

    def _drop(self, connection: InboundConnection) -> None:
        state = "over" if connection.is_over else "slow" if connection.has_sent else "silent"
        log.info("dropped a connection from %s: it was %s", connection.partner.short(), state)
        self.remove(connection)
        connection.drop()


def _is_below_rate(connection: InboundConnection) -> bool:
    bytes_before, began_s = connection.begun
    return connection.carried() - bytes_before < LEAST_RATE * (loop_s() - began_s - LEAST_RATE_S)


async def handle(handler: StreamHandler, purpose: Purpose, stream: Stream) -> None:
    """Run a handler, log its error if it fails, and close its stream."""
    try:
        await handler(purpose, stream)
    except (TransportError, PeerMisbehaved, Refused) as error:
        log.info("stream from %s: %s", stream.partner.short(), error)
    except Exception:
        log.exception("the handler of a stream from %s failed", stream.partner.short())
    finally:
        stream.close()
