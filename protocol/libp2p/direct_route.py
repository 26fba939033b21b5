"""Upgrade relayed connections to direct ones. p2pd never opens a second connection to a connected peer, so the relayed one ends first.

Either an address of the partner has become reachable, or p2pd tries hole punching, which it does only at the start of a relayed connection
and once four hosts have observed each side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from gossamer.protocol.addresses import host_of, route
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.dial_back import Reached, try_to_reach
from gossamer.protocol.libp2p.dialer import Dialer
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.newest import keep_newest

AGAIN_S = (30.0, 3600.0)  # time between two attempts with one partner: the first, and the largest after repeated doubling
OBSERVERS = 4  # hosts that must have observed us before p2pd tries hole punching
REMEMBERED = 256  # partners whose next attempt is remembered


class DirectRoute:
    """Upgrades connections of one p2pd. `is_busy` returns whether a call between us and a partner is open."""

    def __init__(self, control: Control, dialer: Dialer, is_busy: Callable[[PeerId], bool]) -> None:
        self._control = control
        self._dialer = dialer
        self._is_busy = is_busy
        self._next_s: dict[PeerId, tuple[float, float]] = {}  # loop time of the next attempt, and the delay after it

    async def prepare(self, partner: PeerId, addresses: Sequence[str]) -> bool:
        """Return whether a new connection to a partner may be direct. Raises Unreachable.

        A relayed connection is closed only if an attempt is due, the partner is not busy, and a direct connection seems possible.
        """
        ends = await self._control.connected()
        if route(ends.get(partner, "")) != "relayed":
            return True
        now_s = asyncio.get_running_loop().time()
        next_s, pause_s = self._next_s.get(partner, (now_s + AGAIN_S[0], AGAIN_S[0]))
        is_due = now_s >= next_s and not self._is_busy(partner)
        later_s = (now_s + pause_s, min(2 * pause_s, AGAIN_S[1])) if is_due else (next_s, pause_s)
        keep_newest(self._next_s, partner, later_s, REMEMBERED)
        if not is_due or not (await self._answers(partner, addresses) or _is_seen_by_enough(ends)) or self._is_busy(partner):
            return False
        await self._control.disconnect(partner)
        return True

    async def _answers(self, partner: PeerId, addresses: Sequence[str]) -> bool:
        """Return whether a libp2p peer answers at one of these addresses without a relay."""
        direct = [address for address in self._dialer.plausible(partner, addresses) if route(address) != "relayed"]
        for address in direct:
            with suppress(ValueError):
                if await try_to_reach(address) is Reached.YES:
                    return True
        return False


def _is_seen_by_enough(ends: Mapping[PeerId, str]) -> bool:
    return len({host_of(end) for end in ends.values() if route(end) == "direct"}) >= OBSERVERS
