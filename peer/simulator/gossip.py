"""Methods of pairs: peers step at their own rates and meet two by two (NoLoCo), or never (`local`).

Each instant of virtual time: the peers whose inner step ends open and apply the meetings that wait for them, then new meetings begin.
A meeting counts for both sides or for neither: when a peer goes away before it is decided, both drop it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from random import Random

from peer.simulator.matching import Matcher, matcher
from peer.simulator.pair import Outer, Pair
from peer.simulator.population import Population
from peer.simulator.replicas import coding
from peer.simulator.rules import PairRule
from peer.simulator.timeline import step_ends


def train_alone(population: Population) -> Iterator[Fraction]:
    """Let every peer train by itself; yield each time at which inner steps end."""
    scenario = population.scenario
    for now, arrived in step_ends(scenario.rates, scenario.num_steps, population.presence):
        for peer in arrived:
            population.replicas[peer].inner_step()
        yield now


def gossip(population: Population, rule: PairRule) -> Iterator[Fraction]:
    """Let peers train and meet by a rule; yield each time at which inner steps end, after its meetings."""
    scenario = population.scenario
    table = Gossip(population, rule, matcher(scenario, len(population.layout.codecs)))
    for now, arrived in step_ends(scenario.rates, scenario.num_steps, population.presence):
        for peer in arrived:
            population.replicas[peer].inner_step()
            table.outers[peer].count_tokens(scenario.step_tokens)
        table.boundary(now, arrived)
        yield now


class Gossip:
    """All meetings under way. A fragment of a peer is in at most one."""

    def __init__(self, population: Population, rule: PairRule, matching: Matcher) -> None:
        self.outers = [Outer(replica, population.layout) for replica in population.replicas]
        self._population = population
        self._matcher = matching
        self._rule = rule
        self._meetings: dict[tuple[int, int], Pair] = {}  # by peer and fragment, until that peer has applied or dropped it
        self._alone: set[tuple[int, int]] = set()
        self._away: set[int] = set()
        self._seeds = Random(f"{population.scenario.seed}/meetings")

    def boundary(self, now: Fraction, arrived: Sequence[int]) -> None:
        """Do what the peers at a step boundary do there."""
        self._away.difference_update(arrived)
        self._settle(now, arrived)
        self._matcher.arrange(now, arrived, self)
        self._settle(now, arrived)
        for peer in arrived:
            if self._population.presence.is_away(peer, now):
                self._leave(peer)

    # ------------------------------------------------------------------ what the matcher sees and does

    def is_free(self, peer: int, fragment: int) -> bool:
        """Say whether the peer is there and the fragment in no meeting."""
        return peer not in self._away and (peer, fragment) not in self._meetings and (peer, fragment) not in self._alone

    def clock_gap(self, one: int, two: int) -> int:
        """Return by how many steps the two peers' schedule clocks differ."""
        return abs(self._population.replicas[one].clock_steps - self._population.replicas[two].clock_steps)

    def begin(self, one: int, two: int, fragment: int) -> None:
        """Let two peers meet over a fragment, each from its next step boundary on."""
        meeting = Pair(fragment, (self.outers[one], self.outers[two]), self._seeds.getrandbits(63))
        self._meetings[one, fragment] = self._meetings[two, fragment] = meeting

    def step_alone(self, peer: int, fragment: int) -> None:
        """Let a peer take the fragment's outer step alone at its next step boundary."""
        self._alone.add((peer, fragment))

    # ------------------------------------------------------------------ meetings under way

    def _settle(self, now: Fraction, arrived: Sequence[int]) -> None:
        here = set(arrived)
        mine = [(peer, meeting) for (peer, _), meeting in self._meetings.items() if peer in here]
        for peer, meeting in mine:
            if peer not in meeting.sides:
                meeting.open(self.outers[peer])
        for _, meeting in mine:
            if meeting.is_open and meeting.ready is None:
                self._exchange(meeting, now)
        for peer, meeting in mine:
            if meeting.ready is not None and meeting.ready <= now:
                self._apply(peer, meeting)
        for peer, fragment in sorted(self._alone):
            if peer in here:
                self.outers[peer].solo(fragment, self._rule)
                self._finish_alone(peer, fragment)

    def _exchange(self, meeting: Pair, now: Fraction) -> None:
        with coding("a pair of peers"):
            meeting.exchange(self._rule, token_weights=self._population.scenario.token_weights)
        meeting.ready = now + self._population.scenario.delay_steps
        codec = self._population.layout.codecs[meeting.fragment]
        self._population.traffic.sent(2 * (codec.sketch_bytes + codec.payload_bytes))

    def _apply(self, peer: int, meeting: Pair) -> None:
        if not any(side.applied for side in meeting.sides.values()):
            self._population.traffic.completed += 1
        meeting.apply(peer, self._rule)
        del self._meetings[peer, meeting.fragment]
        self._matcher.done(peer, meeting.fragment)

    def _finish_alone(self, peer: int, fragment: int) -> None:
        self._alone.discard((peer, fragment))
        self._population.traffic.solo += 1
        self._matcher.done(peer, fragment)

    def _leave(self, peer: int) -> None:
        """Go away, and drop the meetings under way: no partner has applied one of them, or this peer just would have too."""
        self._away.add(peer)
        for meeting in [meeting for (member, _), meeting in self._meetings.items() if member == peer]:
            assert not any(side.applied for side in meeting.sides.values())
            for outer in meeting.members:
                del self._meetings[outer.replica.number, meeting.fragment]
            self._population.traffic.dropped += 1
