"""The votes on a run's result: which result each peer has, which it has seen agreed, and what is agreed by that.

A peer votes for the result that its trainer has taken. A result is agreed where

- QUORUM of the weight of the partners at the end, and ours, votes for it; or
- more than half of the others, of two at least, have seen it agreed. So one that tells each peer another vote cannot keep us out.

Peers see votes at different times, and votes can be withdrawn, so two results may seem agreed at once. A result is settled where QUORUM has
seen it agreed and votes for nothing else. Of any two quorums the overlap is a third of the weight, so two results are settled only if a
third of the weight lies. The vote of a peer that has seen its result agreed also counts when it is restarted, and after it has left.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.sybil_groups import EPSILON, SybilGroups
from gossamer.peer.sync.state_source import StateSource
from gossamer.protocol.identity import PeerId
from gossamer.protocol.tasks import loop_s

QUORUM = 2 / 3
AWAY_S = 20.0  # a partner that was there so lately may be back
TELLING_S = 3.0  # for the partners to ask which result we have seen agreed: else they wait for us for AWAY_S when we have left


@dataclass(frozen=True, slots=True)
class Vote:
    """What a peer last told about its result; names are empty where there is none."""

    name: bytes = b""  # of the result that its trainer has
    agreed: bytes = b""  # of the result that it has seen agreed, and of which it has all pieces: it takes this one
    is_fetching: bool = False  # it has none yet, and fetches or judges ours

    @property
    def choice(self) -> bytes:
        """Return the result that this vote is for."""
        return self.agreed or self.name


NO_VOTE = Vote()


@dataclass(slots=True)
class ResultVotes:
    """The votes of all peers. `own` holds ours; `has` tells whether a result is at hand, whoever has left with it.

    A partner may fetch and judge our results for `fetch_s` in all; then it counts as one that will not take them.
    """

    groups: SybilGroups
    own: StateSource
    has: Callable[[bytes], bool]
    fetch_s: float
    changed_s: float = -math.inf  # when a partner last voted for another result than before; loop time
    withdrawn: set[PeerId] = field(default_factory=set)  # partners that have given up their result, since we last did so
    _votes: dict[PeerId, Vote] = field(default_factory=dict)
    _fetching_since_s: dict[PeerId, float] = field(default_factory=dict)  # when each peer first did; loop time
    _given_up: set[bytes] = field(default_factory=set)  # results that we gave up, with those of others

    def note(self, entry: KnownPeer, vote: Vote) -> None:
        """Note what a peer has just told."""
        had = self.of(entry)
        if entry.has_met and vote.choice != had.choice:
            self.changed_s = loop_s()
            if not vote.choice and had.choice not in self._given_up:
                self.withdrawn.add(entry.peer_id)
        self._votes[entry.peer_id] = vote
        if vote.is_fetching:
            self._fetching_since_s.setdefault(entry.peer_id, loop_s())

    def of(self, entry: KnownPeer) -> Vote:
        """Return the last vote of a peer."""
        return self._votes.get(entry.peer_id, NO_VOTE)

    def at_end(self) -> list[KnownPeer]:
        """Return the partners within reach that have come to the end of the run."""
        return [entry for entry in self.groups.partners(loop_s()) if entry.finished and not entry.failures]

    def holders(self, name: bytes) -> list[KnownPeer]:
        """Return the live peers that have a result."""
        return [entry for entry in self.groups.book.live(loop_s()) if self.of(entry).name == name]

    def left_with(self, name: bytes) -> list[KnownPeer]:
        """Return the partners that have seen this result agreed and are not at the end within reach: most have left with it."""
        return [entry for entry in self._elsewhere() if self.of(entry).agreed == name]

    def is_agreed(self, name: bytes) -> bool:
        """Return whether a result is agreed, as far as we know."""
        voters, own = self._voters(), self._own.choice == name
        if not own and not any(self.of(entry).choice == name for entry in voters):
            return False
        if self._share(voters, lambda vote: vote.choice == name, own) >= QUORUM - EPSILON:
            return True
        is_seen = len(voters) > 1 and self._share(voters, lambda vote: vote.agreed == name, own=None) > 0.5
        return is_seen and (not self.own.agreed or self._preference(name) > self._preference(self.own.agreed))

    def is_settled(self, name: bytes) -> bool:
        """Return whether QUORUM has seen a result agreed."""
        return bool(name) and self._share(self._voters(), lambda vote: vote.agreed == name, own=self.own.agreed == name) >= QUORUM - EPSILON

    def is_possible(self, name: bytes) -> bool:
        """Return whether our result would be agreed, or settled if we have seen it agreed, once all follow that may.

        Those may that fetch or judge it, and those that are away for a moment.
        """

        def may_follow(entry: KnownPeer) -> bool:
            vote = self.of(entry)
            follows = vote.agreed == name if self.own.agreed else vote.choice == name
            return follows or self._is_fetching(entry) or self.is_away(entry)

        return self.groups.share(self._voters(), may_follow, own=True) >= QUORUM - EPSILON

    def is_judged(self) -> bool:
        """Return whether a partner fetches or judges our result."""
        return any(map(self._is_fetching, self.at_end()))

    def is_known(self) -> bool:
        """Return whether all partners at the end have asked since we have seen our result agreed, or had the time for it."""
        since_s = self.own.agreed_s
        has_asked = (self.own.asked_s.get(entry.peer_id, -math.inf) > since_s for entry in self.at_end())
        return loop_s() >= since_s + TELLING_S or all(has_asked)

    def most_withdraw(self) -> bool:
        """Return whether most partners at the end and we would have given up, if we did."""
        share = self.groups.share(self.at_end(), lambda entry: entry.peer_id in self.withdrawn, own=True)
        return bool(self.withdrawn) and share > 0.5

    def withdraw(self) -> None:
        """Note that we give up our result and those of others; of their votes, those for an agreed one stay until they report another."""
        self._given_up |= {vote.choice for vote in (*self._votes.values(), self._own) if vote.choice}
        self._votes = {peer: vote for peer, vote in self._votes.items() if vote.agreed}
        self.withdrawn.clear()

    def is_away(self, entry: KnownPeer) -> bool:
        """Tell whether a partner has just gone without leaving the run: it may be back in a moment."""
        return entry.has_met and entry.failures > 0 and loop_s() - entry.seen_s < AWAY_S

    def _is_fetching(self, entry: KnownPeer) -> bool:
        return self.of(entry).is_fetching and loop_s() - self._fetching_since_s[entry.peer_id] < self.fetch_s

    @property
    def _own(self) -> Vote:
        return Vote(self.own.result.name if self.own.result else b"", self.own.agreed)

    def _voters(self) -> list[KnownPeer]:
        """Return the partners at the end; those that are away for a moment; and those elsewhere with an agreed result that is at hand."""
        return [*self.at_end(), *filter(self._counts_elsewhere, self._elsewhere())]

    def _elsewhere(self) -> list[KnownPeer]:
        there = {entry.peer_id for entry in self.at_end()}
        known = dict.fromkeys((*self._votes, *(entry.peer_id for entry in self.groups.partners(loop_s()))))
        return [entry for entry in map(self.groups.book.get, known) if entry.peer_id not in there and entry.has_met]

    def _counts_elsewhere(self, entry: KnownPeer) -> bool:
        agreed = self.of(entry).agreed
        return (bool(agreed) and self.has(agreed)) or (entry.finished and self.is_away(entry))

    def _preference(self, name: bytes) -> tuple[float, bytes]:
        """Rank results that different peers have seen agreed: by weight, then by a hash, so that all prefer the same one."""
        weight = self._share(self._voters(), lambda vote: vote.agreed == name, own=self.own.agreed == name)
        return round(weight, 6), hashlib.sha256(self.groups.terms.run_id + name).digest()

    def _share(self, voters: list[KnownPeer], says: Callable[[Vote], bool], own: bool | None) -> float:
        return self.groups.share(voters, lambda entry: says(self.of(entry)), own)
