"""The front door: one table of a peer's inbound connections, whatever transport they came by.

A connection stands in it as a visit, from the moment its partner is proven until it has ended: silent, then in conversation, then over, and
perhaps silent again with another call.
The table says who may come in, and takes the connection of whoever stays silent, or lingers when nothing moves on it any more. Where all
places are taken, those of the newcomer's network or all, it gives a newcomer the place of another that is no conversation: first of those
whose call has not come, the oldest. Then goes a conversation on which next to nothing has moved for ten seconds, of the largest crowd.
Nobody takes the place of any other conversation.
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

FIRST_FRAME_S = 10.0  # from the connection to its call, and from there to the first message
LINGER_S = 75.0  # a connection whose conversation is over is the caller's, to close or to call again: it may carry nothing for this long,
LINGER_MOST_S = 300.0  # and something for that long: what we have said last may still be on its way, megabytes on a slow line


STALLED_S = 10.0
STALLED_BYTES = 1024  # in that time: what keeps a connection alive is no conversation


@dataclass(frozen=True, slots=True)
class StreamCaps:
    """Inbound connections at once."""

    per_purpose: int = 2  # conversations with one partner; a retry may overlap the one that it replaces, hence two
    per_partner: int = 8  # those included that are over
    silent: int = 2  # of a partner that has said nothing on any of them: a key costs nothing
    per_network: int = 16  # of one network of the internet, or through one relay's: keys cost nothing, networks do
    total: int = 64


@dataclass(eq=False, slots=True)
class Visit:
    """One inbound connection. Whoever carries it tells the table what becomes of it."""

    partner: PeerId
    drop: Callable[[], object]  # ends the connection at once
    carried: Callable[[], int]  # bytes so far, either way
    observed: str = ""  # multiaddr from which it comes, where that is known
    purpose: Purpose | None = None  # once its call has come
    is_heard: bool = False  # its opener has said something since
    is_over: bool = False  # the conversation has ended, the connection not yet
    deadline: asyncio.TimerHandle | None = None  # when it is dropped; none during a conversation
    moved: tuple[int, float] = (0, 0.0)  # bytes carried when it was last seen to move, and when that was (loop time)

    @property
    def is_in_call(self) -> bool:
        """Whether a call has come that is not over."""
        return self.purpose is not None and not self.is_over

    @property
    def network(self) -> str:
        """Return where it comes from, as far as that counts; empty for this machine and the local network."""
        return "" if route(self.observed) == "local" else network_of(self.observed)


class Admission:
    """The table. It drops a visit by calling its `drop`, after which the visit is no longer in it."""

    def __init__(self, caps: StreamCaps | None = None, is_banned: Callable[[PeerId], bool] = lambda partner: False) -> None:
        self._caps = caps or StreamCaps()
        self._is_banned = is_banned
        self._visits: dict[Visit, None] = {}  # of those that are silent or over, the one that is so the longest stands first

    def admit(self, partner: PeerId, drop: Callable[[], object], carried: Callable[[], int], observed: str = "") -> Visit | None:
        """Let a connection in, for FIRST_FRAME_S until its call begins; None: its partner is banned, or it is one too many.

        `carried` tells how many bytes have passed on it, either way.
        """
        own = [visit for visit in self._visits if visit.partner == partner]
        most = self._caps.per_partner if any(visit.is_heard for visit in own) else self._caps.silent
        visit = Visit(partner, drop, carried, observed, moved=(0, asyncio.get_running_loop().time()))
        if self._is_banned(partner) or len(own) >= most or not self._has_room(visit.network):
            log.info("a connection from %s was turned away", partner.short())
            return None
        self._visits[visit] = None
        self._allow(visit, FIRST_FRAME_S)
        return visit

    def begin(self, visit: Visit, purpose: Purpose) -> bool:
        """Note what a visit is for now, and wait FIRST_FRAME_S for its first message.

        False: it has another call, this is one too many for this purpose, or the partner was banned meanwhile, or the visit dropped.
        """
        own = [other for other in self._visits if (other.partner, other.purpose) == (visit.partner, purpose) and not other.is_over]
        if visit not in self._visits or visit.is_in_call or len(own) >= self._caps.per_purpose or self._is_banned(visit.partner):
            return False
        visit.purpose, visit.is_heard, visit.is_over = purpose, False, False
        self._allow(visit, FIRST_FRAME_S)
        return True

    def heard(self, visit: Visit) -> bool:
        """Note that the opener has said something: the conversation takes as long as it takes; False: dropped or banned before."""
        self._allow(visit, None)
        visit.is_heard = visit in self._visits and not self._is_banned(visit.partner)
        return visit.is_heard

    def over(self, visit: Visit) -> None:
        """Note that the conversation, if there was one, has ended: the connection goes too, once nothing moves on it any more."""
        if visit in self._visits:
            visit.is_over = True
            self._visits[visit] = self._visits.pop(visit)
            self._linger(visit, asyncio.get_running_loop().time() + LINGER_MOST_S)

    def end(self, visit: Visit) -> None:
        """Forget a visit whose connection has ended. Idempotent."""
        self._visits.pop(visit, None)
        self._allow(visit, None)

    def is_calling(self, partner: PeerId) -> bool:
        """Tell whether a partner holds a conversation with us."""
        return any(visit.partner == partner and visit.is_in_call for visit in self._visits)

    def _allow(self, visit: Visit, seconds: float | None) -> None:
        if visit.deadline is not None:
            visit.deadline.cancel()
        visit.deadline = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._drop, visit)

    def _linger(self, visit: Visit, until_s: float) -> None:
        """Drop a visit after LINGER_S in which it has carried nothing, and then in any case."""
        before, loop = visit.carried(), asyncio.get_running_loop()

        def look() -> None:
            if visit.carried() == before or loop.time() >= until_s:
                self._drop(visit)
            else:
                self._linger(visit, until_s)

        visit.deadline = loop.call_later(min(LINGER_S, until_s - loop.time()), look)

    def _has_room(self, network: str) -> bool:
        """Tell whether there is a place for a newcomer from a network, after dropping another's where there has to be."""
        neighbours = [visit for visit in self._visits if visit.network == network] if network else []
        if len(neighbours) >= self._caps.per_network:
            return self._displace(neighbours)
        return len(self._visits) < self._caps.total or self._displace(list(self._visits))

    def _displace(self, visits: list[Visit]) -> bool:
        """Drop one of these; return whether there was one. A bare connection goes first: it costs the least to open."""
        idle = [visit for visit in visits if visit.is_over or not visit.is_heard]
        stalled = [visit for visit in visits if self._is_stalled(visit)]
        if idle:
            self._drop(min(idle, key=lambda visit: visit.purpose is not None))
        elif stalled:
            crowds = Counter(visit.network for visit in visits)
            self._drop(max(stalled, key=lambda visit: crowds[visit.network]))
        return bool(idle or stalled)

    def _is_stalled(self, visit: Visit) -> bool:
        now_s, carried = asyncio.get_running_loop().time(), visit.carried()
        if carried - visit.moved[0] >= STALLED_BYTES:
            visit.moved = carried, now_s
        return now_s - visit.moved[1] >= STALLED_S

    def _drop(self, visit: Visit) -> None:
        state = "over" if visit.is_over else "stalled" if visit.is_heard else "silent"
        log.info("the connection from %s, %s, was dropped", visit.partner.short(), state)
        self.end(visit)
        visit.drop()


async def handle(handler: StreamHandler, purpose: Purpose, stream: Stream) -> None:
    """Run the handler, log how it failed, and close its stream."""
    try:
        await handler(purpose, stream)
    except (TransportError, PeerMisbehaved, Refused) as error:
        log.info("stream from %s: %s", stream.partner.short(), error)
    except Exception:
        log.exception("the handler of a stream from %s failed", stream.partner.short())
    finally:
        await stream.close()
