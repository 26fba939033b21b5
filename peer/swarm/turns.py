"""Turns: after a long meeting with a peer, or one that it broke off, the others go first, so that it holds a fragment for its share alone.

Identities are free. So peers of its invite or network with such meetings too, and strangers in its network, go behind those of others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection

from gossamer.peer.swarm.known_peer import KnownPeer

LONG_S = 2.0  # after a longer meeting, or one that it broke off, the partner waits: as long as it took, times the other partners...
MOST_TURNS = 8  # ...or this: a slow one must not hold a fragment, and keep others out, for more than its share of the time
LONG_TIMES = 2.0  # as long as meetings with the others usually take, at least: else it is no sign of anything, as on slow lines
FEWEST_OTHERS = 0.5  # of the places of an invite: so many others must be there to go before all of it


class Turns:
    """Until when others go before a peer, an invite or a network. Not thread-safe."""

    def __init__(self) -> None:
        self._until_s: dict[object, float] = {}

    def note_held(self, entry: KnownPeer, partners: Collection[KnownPeer], now_s: float, took_s: float) -> None:
        """Put a peer behind the other `partners`, and its origins behind those of others, after a meeting that was long or broken off."""
        self._until_s = {who: until_s for who, until_s in self._until_s.items() if until_s > now_s}
        others = {other.place if other.network != entry.network else other.peer_id: other.typical_s for other in partners}
        self._go_behind(entry, entry.peer_id, 1, others.values(), now_s, took_s)
        for origin in entry.seen_origins:
            inside = {other.place for other in (entry, *partners) if origin in other.seen_origins}
            outside = {other.place: other.typical_s for other in partners if origin not in other.seen_origins}
            self._go_behind(entry, origin, len(inside), outside.values(), now_s, took_s)

    def of(self, entry: KnownPeer) -> float:
        """Return until when a peer lets others go first."""
        return max(self._until_s.get(who, -math.inf) for who in _behind(entry))

    def _go_behind(self, entry: KnownPeer, who: object, num_inside: int, usual_s: Collection[float], now_s: float, took_s: float) -> None:
        """Put a peer, or its invite or network of so many places, behind others whose meetings usually take so long."""
        if len(usual_s) < FEWEST_OTHERS * num_inside:
            return
        if entry.breaks_off or took_s >= LONG_TIMES * statistics.median_low(usual_s):
            self._until_s[who] = max(self._until_s.get(who, now_s), now_s + took_s * min(MOST_TURNS, len(usual_s)))


def _behind(entry: KnownPeer) -> list[object]:
    """Return after whose meetings a peer lets others go first: its own, and those of its network and its invite if its are such too.

    A stranger waits for its network alone: else members of its invite could keep it out. An invite admits few identities.
    """
    if entry.breaks_off or entry.typical_s >= LONG_S:
        return [entry.peer_id, *entry.seen_origins]
    return [entry.peer_id] if entry.meetings else [entry.peer_id, entry.network]
