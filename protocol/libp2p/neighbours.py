"""Whom a peer of the directory knows: members that can be called, and records that their owners have left here.

Both are bounded, and neither is filled by hearsay: a neighbour has answered us or called us itself, and a record is held because its owner
brought it. Where there is no room, whoever comes from the most crowded network gives way: keys cost nothing, networks do.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nsmallest

from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.records import MemberRecord

BUCKET = 8  # neighbours at one distance
HELD = 512
MIXED_IN = 1 / 8  # of the newcomers of another network take somebody's place: whoever came first would be asked by everybody
SILENT_S = 300.0  # a neighbour that was not heard for so long gives way to another


@dataclass(frozen=True, slots=True)
class Held:
    """A member's record that was checked."""

    record: MemberRecord
    data: bytes  # as its owner signed it

    @property
    def peer(self) -> PeerId:
        """Return whose it is."""
        return self.record.peer_id


def place_of(peer: PeerId) -> int:
    """Return the place of a peer in the directory: nobody chooses it, for it is the hash of its key (160 bits)."""
    return int.from_bytes(hashlib.sha1(peer.raw, usedforsecurity=False).digest(), "big")


def nearest(known: Iterable[Held], place: int, num: int) -> list[Held]:
    """Return those whose places are the nearest (Kademlia's distance), the nearest first."""
    return nsmallest(num, known, key=lambda held: place_of(held.peer) ^ place)


@dataclass(slots=True)
class _Neighbour:
    held: Held
    network: str
    heard_s: float


class Neighbours:
    """Members that can be called, the more of them the nearer their places are to ours. `clock` only goes forward."""

    def __init__(self, me: PeerId, clock: Callable[[], float], rng: random.Random) -> None:
        self._place = place_of(me)
        self._clock = clock
        self._rng = rng
        self._buckets: dict[int, dict[PeerId, _Neighbour]] = {}  # by the first bit in which places differ; the latest heard stands last

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def all(self) -> list[Held]:
        """Return every neighbour's latest record, in force or not."""
        return [known.held for bucket in self._buckets.values() for known in bucket.values()]

    def heard(self, held: Held, network: str) -> None:
        """Note that a member has answered or called, from this network."""
        bucket = self._bucket(held.peer)
        known = bucket.pop(held.peer, None)
        if known is not None and known.held.record.supersedes(held.record):
            held = known.held
        if known is None and len(bucket) >= BUCKET and not self._make_room(bucket, network):
            return
        bucket[held.peer] = _Neighbour(held, network, self._clock())

    def lost(self, peer: PeerId) -> None:
        """Forget one that does not answer."""
        self._bucket(peer).pop(peer, None)

    def quietest(self, for_s: float) -> Held | None:
        """Return the neighbour that was not heard for the longest time, if that is as long as `for_s`."""
        first = [next(iter(bucket.values())) for bucket in self._buckets.values() if bucket]
        quietest = min(first, key=lambda known: known.heard_s, default=None)
        return quietest.held if quietest is not None and self._clock() - quietest.heard_s >= for_s else None

    def _bucket(self, peer: PeerId) -> dict[PeerId, _Neighbour]:
        return self._buckets.setdefault((place_of(peer) ^ self._place).bit_length(), {})

    def _make_room(self, bucket: dict[PeerId, _Neighbour], network: str) -> bool:
        """Drop a neighbour that is silent, of a network that has too many, or now and then any; tell whether one was dropped."""
        goes, known = next(iter(bucket.items()))
        if self._clock() - known.heard_s < SILENT_S:
            counts = Counter(other.network for other in bucket.values())
            most = max(counts.values())
            if most <= counts[network] + 1 and (counts[network] or self._rng.random() >= MIXED_IN):
                return False
            goes = self._rng.choice([peer for peer, other in bucket.items() if counts[other.network] == most])
        del bucket[goes]
        return True


class Holdings:
    """Records that their owners have left here, for others to find; where there is no room, those nearest to our place stay."""

    def __init__(self, me: PeerId) -> None:
        self._place = place_of(me)
        self._held: dict[PeerId, tuple[Held, str]] = {}  # and from which network it came

    def all(self) -> list[Held]:
        """Return every record, in force or not."""
        return [held for held, _ in self._held.values()]

    def put(self, held: Held, network: str, now_s: float) -> bool:
        """Hold a record that its owner brought from this network; return whether it is held now. `now_s`: Unix time."""
        old = self._held.get(held.peer)
        if old is not None and old[0].data != held.data and not held.record.supersedes(old[0].record):
            return False
        self._held[held.peer] = held, network
        if len(self._held) > HELD:
            self._held = {peer: kept for peer, kept in self._held.items() if kept[0].record.expires_s > now_s}
        if len(self._held) > HELD:
            crowded, _ = Counter(network for _, network in self._held.values()).most_common(1)[0]
            crowd = [one.peer for one, network in self._held.values() if network == crowded]
            del self._held[max(crowd, key=lambda peer: place_of(peer) ^ self._place)]
        return held.peer in self._held
