"""The state of a directory node: its routing table of reachable members, and the records that members have stored here.

Both are bounded, and gossip fills neither: a neighbour has replied to us or called us, and a record was stored by its own peer. If there is
no room, an entry from the network with the most entries is evicted, because identities are free and networks are not.
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

BUCKET = 8  # neighbours per distance
HELD = 512  # stored records
MIXED_IN = 1 / 8  # probability that a newcomer from a new network replaces a neighbour: otherwise the oldest members would get all calls
SILENT_S = 300.0  # a neighbour that was silent for this long is replaced first


@dataclass(frozen=True, slots=True)
class Held:
    """A verified record of a member."""

    record: MemberRecord
    data: bytes  # as its owner signed it

    @property
    def peer(self) -> PeerId:
        """Return the record's peer."""
        return self.record.peer_id


def place_of(peer: PeerId) -> int:
    """Return the place of a peer in the key space: the 160-bit hash of its key, so no peer can choose it."""
    return int.from_bytes(hashlib.sha1(peer.raw, usedforsecurity=False).digest(), "big")


def nearest(known: Iterable[Held], place: int, num: int) -> list[Held]:
    """Return the `num` records nearest to a place by Kademlia's XOR distance, the nearest first."""
    return nsmallest(num, known, key=lambda held: place_of(held.peer) ^ place)


@dataclass(slots=True)
class _Neighbour:
    held: Held
    network: str
    contact_s: float


class Neighbours:
    """The routing table: reachable members in Kademlia buckets, denser near our own place. `clock` is monotonic, in seconds."""

    def __init__(self, me: PeerId, clock: Callable[[], float], rng: random.Random) -> None:
        self._place = place_of(me)
        self._clock = clock
        self._rng = rng
        self._buckets: dict[int, dict[PeerId, _Neighbour]] = {}  # by the first differing bit of the place; ordered by last contact

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def all(self) -> list[Held]:
        """Return every neighbour's latest record, valid or expired."""
        return [known.held for bucket in self._buckets.values() for known in bucket.values()]

    def note_contact(self, held: Held, network: str) -> None:
        """Record a reply or a call of a member from this network, and add the member if there is room."""
        bucket = self._bucket(held.peer)
        known = bucket.pop(held.peer, None)
        if known is not None and known.held.record.supersedes(held.record):
            held = known.held
        if known is None and len(bucket) >= BUCKET and not self._make_room(bucket, network):
            return
        bucket[held.peer] = _Neighbour(held, network, self._clock())

    def lost(self, peer: PeerId) -> None:
        """Remove a member that does not reply."""
        self._bucket(peer).pop(peer, None)

    def quietest(self, for_s: float) -> Held | None:
        """Return the neighbour that was silent the longest, None if no neighbour was silent for `for_s` seconds."""
        first = [next(iter(bucket.values())) for bucket in self._buckets.values() if bucket]
        quietest = min(first, key=lambda known: known.contact_s, default=None)
        return quietest.held if quietest is not None and self._clock() - quietest.contact_s >= for_s else None

    def _bucket(self, peer: PeerId) -> dict[PeerId, _Neighbour]:
        return self._buckets.setdefault((place_of(peer) ^ self._place).bit_length(), {})

    def _make_room(self, bucket: dict[PeerId, _Neighbour], network: str) -> bool:
        """Evict a silent neighbour, else one of the most frequent network (sometimes for a new network); return whether one was evicted."""
        evicted, known = next(iter(bucket.items()))
        if self._clock() - known.contact_s < SILENT_S:
            counts = Counter(other.network for other in bucket.values())
            most = max(counts.values())
            if most <= counts[network] + 1 and (counts[network] or self._rng.random() >= MIXED_IN):
                return False
            evicted = self._rng.choice([peer for peer, other in bucket.items() if counts[other.network] == most])
        del bucket[evicted]
        return True


class Holdings:
    """Records that members have stored here. If there is no room, the records nearest to our place are kept."""

    def __init__(self, me: PeerId) -> None:
        self._place = place_of(me)
        self._held: dict[PeerId, tuple[Held, str]] = {}  # with the network from which it was stored

    def all(self) -> list[Held]:
        """Return every record, valid or expired."""
        return [held for held, _ in self._held.values()]

    def put(self, held: Held, network: str, now_s: float) -> bool:
        """Store a member's own record from this network; return whether it is stored. `now_s` is Unix time."""
        old = self._held.get(held.peer)
        if old is not None and old[0].data != held.data and not held.record.supersedes(old[0].record):
            return False
        self._held[held.peer] = held, network
        if len(self._held) > HELD:
            self._held = {peer: kept for peer, kept in self._held.items() if kept[0].record.expires_s > now_s}
        if len(self._held) > HELD:
            crowded, _ = Counter(network for _, network in self._held.values()).most_common(1)[0]
            candidates = [one.peer for one, network in self._held.values() if network == crowded]
            del self._held[max(candidates, key=lambda peer: place_of(peer) ^ self._place)]
        return held.peer in self._held
