"""Virtual time: when each peer's inner steps end, at its own rate, and when it is away.

Exact rational time, so that peers of equal speed arrive together. Deterministic: absences follow from the seed, the peer and the period.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random


@dataclass(frozen=True, slots=True)
class Presence:
    """Who is there: in each period after the first, a peer is away with probability `drop_out`."""

    seed: int
    drop_out: float
    period: int  # in units of virtual time

    def is_away(self, peer: int, now: Fraction | int) -> bool:
        """Say whether the peer is away at this time."""
        number = math.floor(now / self.period)
        return number > 0 and self.drop_out > 0.0 and Random(f"{self.seed}/away/{peer}/{number}").random() < self.drop_out

    def back_at(self, peer: int, now: Fraction) -> Fraction:
        """Return the first time, now or later, when the peer is there."""
        while self.is_away(peer, now):
            now = Fraction((math.floor(now / self.period) + 1) * self.period)
        return now


def step_ends(rates: Sequence[Fraction], end: int, presence: Presence) -> Iterator[tuple[Fraction, list[int]]]:
    """Yield each time until `end` at which inner steps end, and the peers whose steps these are, in order.

    A step that is under way when its peer's absence begins is finished first.
    """
    queue = [(1 / rate, peer) for peer, rate in enumerate(rates)]
    heapq.heapify(queue)
    while queue and queue[0][0] <= end:
        now = queue[0][0]
        peers = []
        while queue and queue[0][0] == now:
            peers.append(heapq.heappop(queue)[1])
        yield now, peers
        for peer in peers:
            heapq.heappush(queue, (presence.back_at(peer, now) + 1 / rates[peer], peer))
