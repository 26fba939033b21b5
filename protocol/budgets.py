"""Token-bucket rate limits for requests from other peers: per peer, per network and in total."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from gossamer.protocol.newest import keep_newest

MAX_BUCKETS = 4096  # the least recently used ones are forgotten


@dataclass(frozen=True, slots=True)
class Allowance:
    """A token bucket's size: `capacity` units at most, refilled continuously from empty to full in `refill_s`."""

    capacity: float
    refill_s: float


class Budgets:
    """A shared bucket of size `in_all`, and a bucket per key for each allowance in `each`. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float], in_all: Allowance, *each: Allowance) -> None:
        self._clock = clock
        self._allowances = (in_all, *each)
        self._buckets: dict[tuple[int, Hashable], tuple[float, float]] = {}  # by index of the allowance, and key: units, and when

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, amount: float, *keys: Hashable) -> bool:
        """Take `amount` from the shared bucket and, per allowance in `each`, its key's. Return False and take nothing if one lacks it."""
        now_s, levels = self._clock(), {}
        for name, allowance in zip(enumerate(("", *keys)), self._allowances, strict=True):
            available, updated_s = self._buckets.get(name, (allowance.capacity, now_s))
            refilled = (now_s - updated_s) / allowance.refill_s * allowance.capacity
            levels[name] = min(allowance.capacity, available + refilled)
        is_enough = min(levels.values()) >= amount
        for name, level in levels.items():
            keep_newest(self._buckets, name, (level - amount if is_enough else level, now_s), MAX_BUCKETS)
        return is_enough
