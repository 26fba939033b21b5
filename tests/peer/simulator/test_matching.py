from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from gossamer.optim.fragments import MEETING_INTERVAL
from gossamer.peer.simulator.pairs import Matcher, OnDemand, Scheduled, matcher
from tests.peer.simulator.swarms import small_scenario


class Hall:
    """A floor where meetings are only written down; who meets is busy, and `busy` fragments and `away` peers are not free."""

    def __init__(self, clocks: Sequence[int] = (0,) * 32) -> None:
        self.clocks = clocks
        self.busy: set[tuple[int, int]] = set()
        self.away: set[int] = set()
        self.restless: set[int] = set()
        self.met: list[tuple[int, int, int]] = []
        self.alone: list[tuple[int, int]] = []

    def is_free(self, peer: int, fragment: int) -> bool:
        return peer not in self.away and (peer, fragment) not in self.busy

    def step_gap(self, one: int, two: int) -> int:
        return abs(self.clocks[one] - self.clocks[two])

    def always_calls(self, peer: int) -> bool:
        return peer in self.restless

    def begin(self, one: int, two: int, fragment: int) -> None:
        self.met.append((one, two, fragment))
        self.busy |= {(one, fragment), (two, fragment)}

    def take_solo_step(self, peer: int, fragment: int) -> None:
        self.alone.append((peer, fragment))


def run(chosen: Matcher, hall: Hall, num_peers: int, steps: range) -> None:
    """Let every peer step at every time, and every meeting be over at once."""
    for now in steps:
        before = len(hall.met)
        chosen.arrange(Fraction(now), range(num_peers), hall)
        for one, two, fragment in hall.met[before:]:
            for peer in (one, two):
                hall.busy.discard((peer, fragment))
                chosen.note_outer_step(peer, fragment)


def meetings_per_step(num_peers: int, inner_steps: int, num_periods: int) -> float:
    """How often a peer meets on demand over one fragment, per inner step, among peers of equal speed."""
    hall, num_steps = Hall(), num_periods * inner_steps
    run(OnDemand(small_scenario(peers=num_peers, inner_steps=inner_steps), 1), hall, num_peers, range(1, num_steps + 1))
    assert not hall.alone
    return 2 * len(hall.met) / num_peers / num_steps


def test_the_scenario_chooses() -> None:
    assert isinstance(matcher(small_scenario(), 3), OnDemand)
    assert isinstance(matcher(small_scenario(matching="scheduled"), 3), Scheduled)


def test_a_schedule_pairs_everybody_once_a_period_per_fragment() -> None:
    hall = Hall()
    run(Scheduled(small_scenario(peers=8), 2), hall, 8, range(1, 9))
    for fragment in range(2):
        members = [peer for one, two, f in hall.met if f == fragment for peer in (one, two)]
        assert sorted(members) == sorted([*range(8), *range(8)])  # two periods of 4


def test_fragments_take_turns() -> None:
    hall, chosen, times = Hall(), Scheduled(small_scenario(peers=2), 4), []
    for now in range(1, 9):
        before = len(hall.met)
        run(chosen, hall, 2, range(now, now + 1))
        times += [(now, fragment) for _, _, fragment in hall.met[before:]]
    assert times == [(now, (now - 1) % 4) for now in range(1, 9)]


def test_matchings_are_random_but_repeatable() -> None:
    first, second, other = Hall(), Hall(), Hall()
    run(Scheduled(small_scenario(peers=8), 1), first, 8, range(40))
    run(Scheduled(small_scenario(peers=8), 1), second, 8, range(40))
    run(Scheduled(small_scenario(peers=8, seed=1), 1), other, 8, range(40))
    assert first.met == second.met != other.met
    assert len({(min(one, two), max(one, two)) for one, two, _ in first.met}) > 15  # of 28


def test_an_odd_peer_steps_alone_and_a_busy_peer_is_left_out() -> None:
    hall = Hall()
    hall.busy = {(1, 0)}
    hall.away = {3}
    Scheduled(small_scenario(peers=5), 1).arrange(Fraction(4), range(5), hall)
    present = [peer for one, two, _ in hall.met for peer in (one, two)] + [peer for peer, _ in hall.alone]
    assert sorted(present) == [0, 2, 4]
    assert len(hall.alone) == 1


@pytest.mark.parametrize("num_peers", [8, 32])
def test_on_demand_a_fragment_meets_every_0_70_inner_steps(num_peers: int) -> None:
    assert meetings_per_step(num_peers, 40, 60) * 40 == pytest.approx(1 / MEETING_INTERVAL, rel=0.03)


def test_the_meeting_interval_solves_its_equation() -> None:
    """E[min(countdown, call)] is the integral of P(countdown > t) * exp(-t / (2 T)) over t."""
    times = np.linspace(0.0, 1.5, 15_001)
    nobody_yet = np.minimum(1.0, 1.5 - times) * np.exp(-times / (2 * MEETING_INTERVAL))
    assert np.trapezoid(nobody_yet, times) == pytest.approx(MEETING_INTERVAL, rel=1e-3)


def test_only_free_peers_with_near_global_steps_are_asked() -> None:
    hall = Hall(clocks=[0, 0, 0, 500])
    hall.away = {1}
    run(OnDemand(small_scenario(peers=4), 1), hall, 1, range(1, 100))
    assert {two for _, two, _ in hall.met} == {2}


def test_a_peer_without_a_partner_waits_and_then_steps_alone() -> None:
    hall = Hall()
    hall.away = {1}
    chosen = OnDemand(small_scenario(peers=2, inner_steps=4), 1)
    times = []
    for now in range(1, 30):
        if hall.alone:
            break
        times.append(now)
        chosen.arrange(Fraction(now), [0], hall)
    assert hall.alone == [(0, 0)]
    assert len(times) > 4


def test_a_run_may_defer_instead() -> None:
    hall = Hall()
    hall.away = {1}
    run(OnDemand(small_scenario(peers=2, no_partner="defer"), 1), hall, 1, range(1, 100))
    assert not hall.alone


def test_one_peer_by_itself_never_waits() -> None:
    hall = Hall()
    chosen = OnDemand(small_scenario(peers=1, inner_steps=4), 1)
    for now in range(1, 7):
        chosen.arrange(Fraction(now), [0], hall)
        hall.busy.update(hall.alone)
    assert hall.alone == [(0, 0)]


def test_steps_made_during_a_meeting_count_towards_the_next_one() -> None:
    def steps_to_the_next(num_counted: int) -> int:
        hall, chosen = Hall(), OnDemand(small_scenario(peers=2, inner_steps=20), 1)
        chosen.note_outer_step(0, 0, num_counted)
        for now in range(1, 40):
            chosen.arrange(Fraction(now), [0], hall)
            if hall.met:
                return now
        return 0

    assert steps_to_the_next(0) == steps_to_the_next(3) + 3 > 3
