"""Sybil groups: statements of other peers are weighted by group, never by identity, because identities are free.

A Sybil group is all peers with one invite or in one network; a peer that the manifest or an invite names is a group by itself. Each group
weighs the same. Inside a group only peers count that we have completed meetings with; if there are none, all count. If all other peers are
one group, each of them weighs the same. In an open run all strangers are one group. The networks in a record are only claims, so groups
decide where to look and what to wait for, never which weights are adopted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gossamer.peer.swarm.address_book import AddressBook, KnownPeer
from gossamer.protocol.addresses import host_of, network_of, route
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.terms import RunTerms, sybil_group_key

SybilGroup = list[KnownPeer]


@dataclass(frozen=True, slots=True)
class SybilGroups:
    """The Sybil groups of the peers in the book."""

    book: AddressBook
    terms: RunTerms

    def voters(self, now_s: float) -> list[KnownPeer]:
        """Return the live peers whose statements count: those with a known global step that their group counts."""
        return [entry for group in self._groups(now_s) for entry in group]

    def typical_global_step(self, now_s: float, total_steps: int, own_global_step: int | None = None) -> int:
        """Return the lower median of the groups' global steps and our own; 0 if none is known.

        Each peer reports its own step, so the median protects against overstatement. Steps beyond the end of the run do not count. Without
        `own_global_step`, peers that have not begun do not count.
        """
        groups = [[entry.global_step for entry in group if entry.global_step <= total_steps] for group in self._groups(now_s)]
        if own_global_step is None:
            groups = [[global_step for global_step in global_steps if global_step] for global_steps in groups]
        groups = [global_steps for global_steps in groups if global_steps]
        global_steps = groups[0] if len(groups) == 1 else [_lower_median(global_steps) for global_steps in groups]
        return _lower_median(global_steps if own_global_step is None else [*global_steps, own_global_step])

    def half_agree(self, now_s: float, agrees: Callable[[KnownPeer], bool], own: bool | None = None) -> bool:
        """Return whether half of the groups agree, our own statement (if any) included; False if no other peer agrees."""
        if not any(agrees(entry) for entry in self.book.live(now_s)):  # grouping 256 entries takes far longer than this test
            return False
        groups = [[agrees(entry) for entry in group] for group in self._groups(now_s)]
        shares = [float(agreeing) for agreeing in groups[0]] if len(groups) == 1 else [sum(group) / len(group) for group in groups]
        agreeing = sum(shares) + bool(own)
        return any(shares) and 2 * agreeing >= len(shares) + (own is not None)

    def half_list(self, now_s: float, peers: Collection[PeerId], many: int) -> bool:
        """Return whether more than half of the groups have `many` members (or all reachable ones) among these peers."""
        groups = [[entry.peer_id in peers for entry in group if not entry.failures] for group in self._groups(now_s)]
        named = [sum(group) >= min(many, len(group)) for group in groups if group]
        return 2 * sum(named) > len(named)

    def accountable(self, entry: KnownPeer) -> set[object]:
        """Return what a peer's statement is attributed to: the peer itself once we have met it, else its invite and networks."""
        return {entry.peer_id} if entry.meetings else self._marks(entry)

    def _groups(self, now_s: float) -> list[SybilGroup]:
        groups = self.group([entry for entry in self.book.live(now_s) if entry.has_global_step])
        return [[entry for entry in group if entry.meetings] or group for group in groups]

    def group(self, entries: Sequence[KnownPeer]) -> list[SybilGroup]:
        """Group peers that share an invite or a network, in the order of their first member."""
        groups: list[tuple[set[object], SybilGroup]] = []
        for entry in entries:
            marks, members = self._marks(entry), [entry]
            for other in [group for group in groups if group[0] & marks]:
                groups.remove(other)
                marks, members = marks | other[0], [*other[1], *members]
            groups.append((marks, members))
        return [members for _, members in groups]

    def _marks(self, entry: KnownPeer) -> set[object]:
        key = sybil_group_key(entry.peer_id, entry.record.credential if entry.record else None, self.terms)
        if key is None and not entry.meetings:
            return {"a stranger"}
        # A relay hides its peers' networks. On a local network each host counts, because its address cannot be faked.
        direct = [(address, route(address)) for address in entry.addresses if route(address) != "relayed"]
        networks: set[object] = {network_of(address) if way == "direct" else host_of(address) for address, way in direct}
        return {key, *networks} if key else networks or {"a stranger"}


def _lower_median(global_steps: Sequence[int]) -> int:
    return sorted(global_steps)[(len(global_steps) - 1) // 2] if global_steps else 0
