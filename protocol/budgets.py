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


@dataclass(slots=True)
class _TokenBucket:
    available: float
    updated_s: float


class Budgets:
    """One token bucket for all requesters together, and one for each key of a requester (its peer id, its network).

    `in_all` sizes the shared bucket; `each` holds one allowance per kind of key. `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float], in_all: Allowance, *each: Allowance) -> None:
        self._clock = clock
        self._allowances = (in_all, *each)
        self._buckets: dict[tuple[int, Hashable], _TokenBucket] = {}  # by index of the allowance, and key

    def __len__(self) -> int:
        """Return the number of token buckets, at most MAX_BUCKETS."""
        return len(self._buckets)

    def take(self, amount: float, *keys: Hashable) -> bool:
        """Take `amount` from the shared bucket and, per allowance in `each`, its key's. Return False and take nothing if one lacks it."""
        buckets = [self._refill(name, allowance) for name, allowance in zip(enumerate(("", *keys)), self._allowances, strict=True)]
        if any(bucket.available < amount for bucket in buckets):
            return False
        for bucket in buckets:
            bucket.available -= amount
        return True

    def _refill(self, name: tuple[int, Hashable], allowance: Allowance) -> _TokenBucket:
        now_s = self._clock()
        bucket = self._buckets.get(name) or _TokenBucket(allowance.capacity, now_s)
        refilled = (now_s - bucket.updated_s) / allowance.refill_s * allowance.capacity
        bucket.available = min(allowance.capacity, bucket.available + refilled)
        bucket.updated_s = now_s
        keep_newest(self._buckets, name, bucket, MAX_BUCKETS)
        return bucket
