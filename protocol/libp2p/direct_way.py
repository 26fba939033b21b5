"""Off the relay: a partner that is called through one is tried without it now and then. p2pd opens no second connection beside the first.

Either one of its addresses answers us by now. Or both routers let in what each side sends for in the same moment: p2pd punches such a hole
when a relayed connection begins, once four hosts have seen each side, so the connection begins anew for it. A connection is ended only
while nothing of ours passes on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from gossamer.protocol.addresses import host_of, route
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.dial_back import Reached, try_to_reach
from gossamer.protocol.libp2p.dialling import Dialling
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.newest import keep_newest

AGAIN_S = (30.0, 3600.0)  # between two tries with one partner: at first, and after more and more of them
OBSERVERS = 4  # hosts that must have seen us before p2pd punches
REMEMBERED = 256


class DirectWay:
    """Over one p2pd. `is_busy` tells whether something passes between us and a partner."""

    def __init__(self, control: Control, dialling: Dialling, is_busy: Callable[[PeerId], bool]) -> None:
        self._control = control
        self._dialling = dialling
        self._is_busy = is_busy
        self._next_s: dict[PeerId, tuple[float, float]] = {}  # when each is tried again, and the pause after that

    async def look(self, partner: PeerId, addresses: Sequence[str]) -> bool:
        """Tell whether the next connection to a partner may run without a relay; one that does not is ended for it. Raises Unreachable."""
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
        """Tell whether a peer of libp2p answers at one of these addresses without a relay."""
        direct = [address for address in self._dialling.plausible(partner, addresses) if route(address) != "relayed"]
        for address in direct:
            with suppress(ValueError):
                if await try_to_reach(address) is Reached.YES:
                    return True
        return False


def _is_seen_by_enough(ends: Mapping[PeerId, str]) -> bool:
    return len({host_of(end) for end in ends.values() if route(end) == "direct"}) >= OBSERVERS
