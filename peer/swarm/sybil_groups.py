"""Sybil groups: statements of other peers are weighted by group, never by identity, because identities are free.

All peers with one invite are one group, unless they have been met in one network alone that another such group shares: then the two are
one group. A peer that the manifest or an invite names is a group by itself; in an open run a network is a group. Each group has the same
weight, each invite in it the same share of that, and each peer of an invite the same share again. With one invite in all, each peer has
the weight of a group.

Only peers that we have met have a vote. A peer that has met nobody listens to strangers where its trainer judges what comes of it.
Networks are those from which peers have connected to us, or at which we have reached them; the addresses in a record are only claims.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.protocol.identity import PeerId, signable
from gossamer.protocol.messages.terms import RunTerms, sybil_group_key
from gossamer.protocol.run.invite import Credential

SybilGroup = list[KnownPeer]
STRANGER = "a stranger"
EPSILON = 1e-9  # sums of weights are not exact


@dataclass(frozen=True, slots=True)
class SybilGroups:
    """The Sybil groups of the peers in the book."""

    book: AddressBook
    terms: RunTerms

    def partners(self, now_s: float) -> list[KnownPeer]:
        """Return the live peers that we have met and whose global step is known: they have a vote."""
        return [entry for entry in self.book.live(now_s) if entry.has_global_step and entry.has_met]

    def voters(self, now_s: float) -> list[KnownPeer]:
        """Return the partners; all live peers with a known global step where there are none."""
        return self.partners(now_s) or [entry for entry in self.book.live(now_s) if entry.has_global_step]

    def typical_global_step(self, now_s: float, total_steps: int, own_global_step: int | None = None) -> int:
        """Return the lower median of the voters' global steps and our own, by weight; 0 if none is known.

        Each peer reports its own step, so the median protects against overstatement. Steps beyond the end of the run do not count. Without
        `own_global_step`, peers that have not begun do not count.
        """
        least_steps = 1 if own_global_step is None else 0
        voters = [entry for entry in self.voters(now_s) if least_steps <= entry.global_step <= total_steps]
        steps = self._weighted_steps(voters)
        return _lower_median(steps if own_global_step is None else [*steps, (own_global_step, 1.0)])

    def typical_beyond(self, now_s: float, least_steps: int, most_steps: int) -> int:
        """Return the lower median of the partners' global steps from `least_steps` to `most_steps`, by weight; 0 if there are none."""
        partners = [entry for entry in self.partners(now_s) if least_steps <= entry.global_step <= most_steps]
        return _lower_median(self._weighted_steps(partners))

    def typical_of_other_stages(self, now_s: float, total_steps: int) -> int:
        """Return the lower median of the global steps of the holders of other stages, by weight; 0 if none is known.

        Those that have carried hops with us count alone, if there are any; paused ones and those that have just left do too, so that a
        single hostile one gains nothing while they are away. Else the live ones count.
        """
        carriers = [entry for entry in self.book.seen_lately(now_s) if entry.has_carried]
        others = [entry for entry in carriers or self.book.everybody(now_s) if entry.stage not in (0, self.book.stage)]
        return _lower_median(self._weighted_steps([entry for entry in others if 0 < entry.global_step <= total_steps]))

    def half_agree(self, voters: Sequence[KnownPeer], agrees: Callable[[KnownPeer], bool], own: bool | None = None) -> bool:
        """Return whether half of the groups of these voters agree, our own statement (if any) included; False if no other peer agrees."""
        if not any(agrees(entry) for entry in voters):
            return False
        agreeing, total = self._share(voters, agrees)
        return 2 * (agreeing + bool(own)) >= total + (own is not None) - EPSILON

    def share(self, voters: Sequence[KnownPeer], agrees: Callable[[KnownPeer], bool], own: bool | None) -> float:
        """Return the share of the weight of these voters and ours that agrees; `own` tells whether we do; None: we do not count."""
        agreeing, total = self._share(voters, agrees)
        return (agreeing + bool(own)) / max(EPSILON, total + (own is not None))

    def drawn(self, peer: PeerId, credential: Credential | None, number: int = 0) -> tuple[bytes, bytes]:
        """Return a peer's place in an order that is the same for all: by its invite, whose key no guest has chosen, then by its id.

        Each number draws another order.
        """
        key = sybil_group_key(peer, credential, self.terms) or peer
        redrawn = [number] if number else []
        first, second = (hashlib.sha256(signable(b"gossamer/draw/1", self.terms.run_id, one.raw, *redrawn)).digest() for one in (key, peer))
        return first, second

    def writing_place(self, peer: PeerId, credential: Credential | None, number: int) -> tuple[bool, bytes, bytes]:
        """Return a peer's place in the order of the writers of a result. Each number draws another order.

        The first order begins with the peers that the manifest names: their ids are part of the run's, so none was chosen for its place.
        A guest may try many ids before it joins, and come first among those of its invite.
        """
        is_guest = peer not in self.terms.issuers and peer not in self.terms.members
        return number == 0 and is_guest, *self.drawn(peer, credential, number)

    def half_list(self, voters: Sequence[KnownPeer], peers: Collection[PeerId], many: int) -> bool:
        """Return whether more than half of the groups have `many` members, or all reachable ones, among these peers."""
        invites = self._invites([entry for entry in voters if not entry.failures])
        named = [weight for weight, of_one in invites if sum(entry.peer_id in peers for entry in of_one) >= min(many, len(of_one))]
        return 2 * sum(named) > sum(weight for weight, _ in invites) + EPSILON

    def accountable(self, entry: KnownPeer) -> set[object]:
        """Return what a peer's statement is attributed to: the peer itself once we have met it, else its invite and its network."""
        return {entry.peer_id} if entry.has_met else {self._voucher(entry), entry.network} - {""}

    def group(self, entries: Sequence[KnownPeer]) -> list[SybilGroup]:
        """Group peers, in the order of their first member."""
        return [[entry for peers in group for entry in peers] for group in self._groups(entries)]

    def num_apart(self, entries: Sequence[KnownPeer], me: PeerId, credential: Credential | None, now_s: float) -> int:
        """Return how many groups these peers are.

        Each peer counts if all of them have the invite of `me`, which shows this credential, or if all peers in sight are one group.
        """
        own_key = sybil_group_key(me, credential, self.terms)
        is_one = all(self._voucher(entry) == own_key for entry in entries) or len(self._groups(self.book.seen_lately(now_s))) == 1
        return len(entries) if is_one else len(self._groups(entries))

    def are_more(
        self, these: Sequence[KnownPeer], those: Sequence[KnownPeer], me: PeerId, credential: Credential | None, now_s: float
    ) -> bool:
        """Return whether these are more than those, by peers and by `num_apart`: one of the two lists may be counted by groups alone."""
        counts = [self.num_apart(entries, me, credential, now_s) for entries in (these, those)]
        return len(these) > len(those) and counts[0] > counts[1]

    def names(self, entries: Sequence[KnownPeer]) -> dict[PeerId, str]:
        """Return the group of each of these peers, by a name that lasts as long as the group has that invite or network."""
        named = {hashlib.sha256(str(key).encode()).hexdigest()[:16]: group for key, group in self._by_key(entries).items()}
        return {entry.peer_id: name for name, group in named.items() for peers in group for entry in peers}

    def _weighted_steps(self, voters: Sequence[KnownPeer]) -> list[tuple[int, float]]:
        return [(entry.global_step, weight) for weight, peers in self._ballots(voters) for entry in peers]

    def _share(self, voters: Sequence[KnownPeer], agrees: Callable[[KnownPeer], bool]) -> tuple[float, float]:
        ballots = self._ballots(voters)
        return sum(weight for weight, peers in ballots for entry in peers if agrees(entry)), sum(
            weight * len(peers) for weight, peers in ballots
        )

    def _ballots(self, voters: Sequence[KnownPeer]) -> list[tuple[float, SybilGroup]]:
        """Return the voters by invite, with the weight of each of them: that of a group, if they and all partners have one invite."""
        invites = self._invites(voters)
        is_only = len(invites) == 1 and len(self._invites([*voters, *self.partners(max(entry.seen_s for entry in voters))])) == 1
        return [(1.0 if is_only else weight / len(peers), peers) for weight, peers in invites]

    def _invites(self, voters: Sequence[KnownPeer]) -> list[tuple[float, SybilGroup]]:
        """Return the voters by invite, with the weight of all of an invite; of two groups at least, if there are two invites."""
        groups = self._groups(voters)
        groups = [[peers] for peers in groups[0]] if len(groups) == 1 else groups
        return [(1.0 / len(group), peers) for group in groups for peers in group]

    def _groups(self, entries: Sequence[KnownPeer]) -> list[list[SybilGroup]]:
        return list(self._by_key(entries).values())

    def _by_key(self, entries: Sequence[KnownPeer]) -> dict[object, list[SybilGroup]]:
        """Return the groups by invite or network, each with its peers by invite."""
        by_invite: dict[object, SybilGroup] = {}
        for entry in entries:
            by_invite.setdefault(self._voucher(entry), []).append(entry)
        groups: dict[object, list[SybilGroup]] = {}
        for key, peers in by_invite.items():
            networks = {entry.network for entry in peers if entry.network}
            groups.setdefault(networks.pop() if len(networks) == 1 else key, []).append(peers)
        return groups

    def _voucher(self, entry: KnownPeer) -> object:
        """Return what stands for a peer: its invite; in an open run the network in which we have met it."""
        key = sybil_group_key(entry.peer_id, entry.credential, self.terms)
        return key or (entry.network if entry.has_met else "") or STRANGER


def _lower_median(steps: Sequence[tuple[int, float]]) -> int:
    half, so_far = sum(weight for _, weight in steps) / 2 - EPSILON, 0.0
    for global_step, weight in sorted(steps):
        so_far += weight
        if so_far >= half:
            return global_step
    return 0
