"""What we answer with costs us bytes, and so everybody gets only so many: each peer, each network, and all together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.errors import GossamerError


@dataclass(frozen=True, slots=True)
class Allowance:
    """Bytes a second, and what may be saved up."""

    bytes_per_s: float
    saved_bytes: float


PER_PEER = Allowance(8e3, 64e3)  # a look takes three answers of 8 kB of three peers, every 20 s at most
PER_NETWORK = Allowance(32e3, 256e3)
IN_ALL = Allowance(128e3, 1e6)
REMEMBERED = 1024  # peers and networks


class Overload(GossamerError):
    """A caller asks for more than it, its network, or everybody together gets."""


@dataclass(slots=True)
class _Bucket:
    left: float
    at_s: float


@dataclass(slots=True)
class Budgets:
    """`clock` only goes forward."""

    clock: Callable[[], float]
    _buckets: OrderedDict[tuple[str, object], _Bucket] = field(default_factory=OrderedDict)

    def spend(self, peer: object, network: str, num_bytes: int) -> None:
        """Take bytes from all three budgets. Raises Overload, and takes none, where one of them does not have them."""
        parts = [(("peer", peer), PER_PEER), (("network", network), PER_NETWORK), (("all", ""), IN_ALL)]
        buckets = [self._filled(key, allowance) for key, allowance in parts]
        for bucket, (key, _) in zip(buckets, parts, strict=True):
            if bucket.left < num_bytes:
                raise Overload(f"the budget of {'all callers' if key[0] == 'all' else 'this ' + key[0]} is spent")
        for bucket in buckets:
            bucket.left -= num_bytes

    def _filled(self, key: tuple[str, object], allowance: Allowance) -> _Bucket:
        now_s = self.clock()
        bucket = self._buckets.pop(key, None) or _Bucket(allowance.saved_bytes, now_s)
        bucket.left = min(allowance.saved_bytes, bucket.left + (now_s - bucket.at_s) * allowance.bytes_per_s)
        bucket.at_s = now_s
        self._buckets[key] = bucket
        if len(self._buckets) > 2 * REMEMBERED + 1:
            del self._buckets[next(other for other in self._buckets if other[0] != "all")]
        return bucket
