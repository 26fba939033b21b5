"""Matching: which peers meet and when, on demand as real peers do, or by a schedule of perfect matchings as in the NoLoCo paper.

Both depend on the seed alone. The meetings themselves are in pairs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from random import Random
from typing import Protocol

from gossamer.optim.fragments import Countdown
from gossamer.peer.simulator.scenario import ON_DEMAND, Scenario


class Floor(Protocol):
    """A matcher's view of the swarm, and the meetings that it may begin there."""

    def is_free(self, peer: int, fragment: int) -> bool:
        """Return whether the peer is present and the fragment in no meeting."""

    def clock_gap(self, one: int, two: int) -> int:
        """Return the difference of the two peers' global steps."""

    def begin(self, one: int, two: int, fragment: int) -> None:
        """Let two peers meet over a fragment, each from its next step boundary on."""

    def step_alone(self, peer: int, fragment: int) -> None:
        """Let a peer take the fragment's outer step alone at its next step boundary."""


class Matcher(Protocol):
    """Decides which peers meet."""

    def arrange(self, now: Fraction, arrived: Sequence[int], floor: Floor) -> None:
        """Begin the meetings that are due; `arrived` are the peers at a step boundary now."""

    def done(self, peer: int, fragment: int) -> None:
        """Note that the peer took an outer step on the fragment."""


class OnDemand:
    """Each peer counts down per fragment and asks a random free peer (docs/concepts/fragments.md)."""

    def __init__(self, scenario: Scenario, num_fragments: int) -> None:
        outer = scenario.manifest.outer
        self._countdowns = [Countdown(num_fragments, scenario.period, _seed(scenario.seed, n)) for n in range(scenario.num_peers)]
        self._random = Random(f"{scenario.seed}/partners")
        self._max_clock_gap = outer.max_clock_gap_steps
        self._timeout = scenario.period  # in units of virtual time
        self._defer = outer.no_partner == "defer"
        self._asking_since: dict[tuple[int, int], Fraction] = {}

    def arrange(self, now: Fraction, arrived: Sequence[int], floor: Floor) -> None:
        """Count an inner step of the peers that arrived, and find partners for their due fragments."""
        for peer in arrived:
            self._countdowns[peer].tick()
            for fragment in self._countdowns[peer].due():
                if floor.is_free(peer, fragment):
                    self._seek(now, peer, fragment, floor)

    def _seek(self, now: Fraction, peer: int, fragment: int, floor: Floor) -> None:
        others = [other for other in range(len(self._countdowns)) if other != peer]
        willing = [o for o in others if floor.is_free(o, fragment) and floor.clock_gap(peer, o) <= self._max_clock_gap]
        since = self._asking_since.setdefault((peer, fragment), now)
        if willing:
            floor.begin(peer, self._random.choice(willing), fragment)
        elif others and now - since < self._timeout:
            return
        elif self._defer:
            self.done(peer, fragment)
        else:
            floor.step_alone(peer, fragment)

    def done(self, peer: int, fragment: int) -> None:
        """Start the fragment's next countdown."""
        self._asking_since.pop((peer, fragment), None)
        self._countdowns[peer].reset(fragment)


class Scheduled:
    """Every inner_steps of virtual time all peers are paired at random, fragments taking turns (NoLoCo, section 3)."""

    def __init__(self, scenario: Scenario, num_fragments: int) -> None:
        self._num_peers = scenario.num_peers
        self._period = scenario.period
        self._seed = scenario.seed
        self._next = [Fraction(self._period * (fragment + 1), num_fragments) for fragment in range(num_fragments)]

    def arrange(self, now: Fraction, arrived: Sequence[int], floor: Floor) -> None:
        """Pair all peers for each fragment whose time has come."""
        for fragment, time in enumerate(self._next):
            if time <= now:
                self._next[fragment] = time + self._period
                self._pair(time, fragment, floor)

    def _pair(self, time: Fraction, fragment: int, floor: Floor) -> None:
        # Peers that are away or in an earlier meeting are left out; with an odd number one peer steps alone.
        order = [peer for peer in range(self._num_peers) if floor.is_free(peer, fragment)]
        Random(f"{self._seed}/round/{fragment}/{time}").shuffle(order)
        while len(order) > 1:
            floor.begin(order.pop(), order.pop(), fragment)
        for peer in order:
            floor.step_alone(peer, fragment)

    def done(self, peer: int, fragment: int) -> None:
        """Do nothing: the schedule does not depend on outer steps."""


def matcher(scenario: Scenario, num_fragments: int) -> Matcher:
    """Return the scenario's matcher."""
    return (OnDemand if scenario.matching == ON_DEMAND else Scheduled)(scenario, num_fragments)


def _seed(run_seed: int, peer: int) -> int:
    return Random(f"{run_seed}/countdown/{peer}").getrandbits(48)
