from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from peer.simulator.matching import Matcher, OnDemand, Scheduled, matcher
from tests.peer.simulator.swarms import small_scenario


class Hall:
    """A floor where meetings are only written down; `busy` fragments and `away` peers are not free."""

    def __init__(self, clocks: Sequence[int] = (0,) * 9) -> None:
        self.clocks = clocks
        self.busy: set[tuple[int, int]] = set()
        self.away: set[int] = set()
        self.met: list[tuple[int, int, int]] = []
        self.alone: list[tuple[int, int]] = []

    def is_free(self, peer: int, fragment: int) -> bool:
        return peer not in self.away and (peer, fragment) not in self.busy

    def clock_gap(self, one: int, two: int) -> int:
        return abs(self.clocks[one] - self.clocks[two])

    def begin(self, one: int, two: int, fragment: int) -> None:
        self.met.append((one, two, fragment))

    def step_alone(self, peer: int, fragment: int) -> None:
        self.alone.append((peer, fragment))


def run(chosen: Matcher, hall: Hall, num_peers: int, steps: range) -> None:
    """Let every peer step at every time, and every meeting be over at once."""
    for now in steps:
        before = len(hall.met)
        chosen.arrange(Fraction(now), range(num_peers), hall)
        for one, two, fragment in hall.met[before:]:
            chosen.done(one, fragment)
            chosen.done(two, fragment)


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
        chosen.arrange(Fraction(now), range(2), hall)
        times += [(now, fragment) for _, _, fragment in hall.met[before:]]
    assert times == [(now, (now - 1) % 4) for now in range(1, 9)]


def test_matchings_are_random_but_repeatable() -> None:
    first, second, other = Hall(), Hall(), Hall()
    run(Scheduled(small_scenario(peers=8), 1), first, 8, range(40))
    run(Scheduled(small_scenario(peers=8), 1), second, 8, range(40))
    run(Scheduled(small_scenario(peers=8, seed=1), 1), other, 8, range(40))
    assert first.met == second.met != other.met
    assert len({(min(one, two), max(one, two)) for one, two, _ in first.met}) > 15  # of 28


def test_an_odd_peer_steps_alone_and_who_is_busy_sits_out() -> None:
    hall = Hall()
    hall.busy = {(1, 0)}
    hall.away = {3}
    Scheduled(small_scenario(peers=5), 1).arrange(Fraction(4), range(5), hall)
    present = [peer for one, two, _ in hall.met for peer in (one, two)] + [peer for peer, _ in hall.alone]
    assert sorted(present) == [0, 2, 4]
    assert len(hall.alone) == 1


def test_on_demand_meets_every_period_on_average() -> None:
    """A peer asks every inner_steps and is asked as often, which starts its countdown anew: about 1.5 times as many meetings."""
    hall = Hall()
    run(OnDemand(small_scenario(peers=8), 1), hall, 8, range(1, 401))
    per_peer = 2 * len(hall.met) / 8
    assert 400 / 4 < per_peer < 1.8 * 400 / 4
    assert not hall.alone


def test_only_those_who_are_free_and_near_in_time_are_asked() -> None:
    hall = Hall(clocks=[0, 0, 0, 500])
    hall.away = {1}
    run(OnDemand(small_scenario(peers=4), 1), hall, 1, range(1, 100))
    assert {two for _, two, _ in hall.met} == {2}


def test_who_finds_nobody_waits_and_then_steps_alone() -> None:
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
