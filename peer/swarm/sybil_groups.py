"""Whose word counts, and for how much: groups, never keys, for keys cost nothing.

A group is everybody who came by the same invite, or is found in the same network; whom the manifest or an invite names counts by name. What
peers of one group say together weighs as much as what one of another says: the holder of an ordinary invite is one group with a hundred keys.
Inside a group those speak with whom meetings of ours have counted, for that is evidence; strangers only where there are no others. Where all
the others are one group there is nothing else to count, and each of them weighs alike.

In an open run nobody vouches for anybody: strangers are one group together, and whom we have met counts by network. What a record says of
networks is only a claim. So groups decide where to look and what to wait for, never which weights are taken over: their loss on our own
text does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gossamer.peer.swarm.address_book import AddressBook, KnownPeer
from gossamer.protocol.addresses import host_of, network_of, route
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.terms import RunTerms, vouched_by

SybilGroup = list[KnownPeer]


@dataclass(frozen=True, slots=True)
class SybilGroups:
    """The groups of those in the book."""

    book: AddressBook
    terms: RunTerms

    def voters(self, now_s: float) -> list[KnownPeer]:
        """Return who has a say among the live peers that have told their clocks."""
        return [entry for group in self._groups(now_s) for entry in group]

    def typical_clock(self, now_s: float, total_steps: int, own_steps: int | None = None) -> int:
        """Return the lower median of the others' clocks, by groups, and our own; 0 when none is known.

        Each says it of itself: neither the furthest clock counts, nor one beyond the end of the run, and of two clocks the lower one does.
        Without a clock of our own, those who have not begun either do not count.
        """
        groups = [[entry.clock_steps for entry in group if entry.clock_steps <= total_steps] for group in self._groups(now_s)]
        if own_steps is None:
            groups = [[clock_steps for clock_steps in clocks if clock_steps] for clocks in groups]
        groups = [clocks for clocks in groups if clocks]
        clocks = groups[0] if len(groups) == 1 else [_lower_median(clocks) for clocks in groups]
        return _lower_median(clocks if own_steps is None else [*clocks, own_steps])

    def half_say(self, now_s: float, says: Callable[[KnownPeer], bool], own: bool | None = None) -> bool:
        """Tell whether half of the groups say so, we among them where we have a say; never where nobody else does."""
        if not any(says(entry) for entry in self.book.live(now_s)):  # to put 256 together takes far longer than to ask each
            return False
        groups = [[says(entry) for entry in group] for group in self._groups(now_s)]
        shares = [float(said) for said in groups[0]] if len(groups) == 1 else [sum(group) / len(group) for group in groups]
        said = sum(shares) + bool(own)
        return any(shares) and 2 * said >= len(shares) + (own is not None)

    def half_name(self, now_s: float, peers: Collection[PeerId], many: int) -> bool:
        """Tell whether of more than half of the groups, we among them, so many members (or all within reach) are among these peers."""
        groups = [[entry.peer_id in peers for entry in group if not entry.failures] for group in self._groups(now_s)]
        named = [sum(group) >= min(many, len(group)) for group in groups if group]
        return 2 * sum(named) > len(named)

    def answerable(self, entry: KnownPeer) -> set[object]:
        """Return who answers for what a peer says: itself once we have met it, else its invite and its networks."""
        return {entry.peer_id} if entry.meetings else self._marks(entry)

    def _groups(self, now_s: float) -> list[SybilGroup]:
        groups = self.group([entry for entry in self.book.live(now_s) if entry.has_clock])
        return [[entry for entry in group if entry.meetings] or group for group in groups]

    def group(self, entries: Sequence[KnownPeer]) -> list[SybilGroup]:
        """Put together those who share an invite or a network, in the order in which they come."""
        groups: list[tuple[set[object], SybilGroup]] = []
        for entry in entries:
            marks, members = self._marks(entry), [entry]
            for other in [group for group in groups if group[0] & marks]:
                groups.remove(other)
                marks, members = marks | other[0], [*other[1], *members]
            groups.append((marks, members))
        return [members for _, members in groups]

    def _marks(self, entry: KnownPeer) -> set[object]:
        voucher = vouched_by(entry.peer_id, entry.record.credential if entry.record else None, self.terms)
        if voucher is None and not entry.meetings:
            return {"a stranger"}
        # A relay hides where its peers are; on a local network each machine is known by sight.
        direct = [(address, route(address)) for address in entry.addresses if route(address) != "relayed"]
        networks: set[object] = {network_of(address) if way == "direct" else host_of(address) for address, way in direct}
        return {voucher, *networks} if voucher else networks or {"a stranger"}


def _lower_median(clocks: Sequence[int]) -> int:
    return sorted(clocks)[(len(clocks) - 1) // 2] if clocks else 0
