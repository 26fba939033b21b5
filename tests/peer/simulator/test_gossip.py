from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch

from peer.simulator.gossip import Gossip
from peer.simulator.matching import Matcher, matcher
from peer.simulator.pair import Outer
from peer.simulator.population import Population
from peer.simulator.rules import noloco_rule
from tests import reference
from tests.peer.simulator.swarms import furthest, small_population, small_scenario, trained, training, weights

NUM_CHECKED = 40  # values compared with the oracle, one by one


class Nobody:
    """A matcher that starts nothing and counts the outer steps it hears of."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def arrange(self, now: Fraction, arrived: object, floor: object) -> None:
        pass

    def done(self, peer: int, fragment: int) -> None:
        self.steps.append((peer, fragment))


def by_hand(**choices: object) -> tuple[Population, Gossip, Nobody]:
    """A swarm whose meetings the test begins."""
    population = small_population(small_scenario(peers=3, **choices))
    matcher: Matcher = Nobody()
    assert isinstance(matcher, Nobody)
    return population, Gossip(population, noloco_rule(population.scenario), matcher), matcher


def step(population: Population, table: Gossip, *peers: int) -> None:
    for peer in peers:
        population.replicas[peer].inner_step()
        table.outers[peer].count_tokens(32)


@pytest.mark.parametrize("gamma", [0.7, 1.2])
def test_a_swarm_of_two_that_meets_on_schedule_is_heavy_ball_diloco(gamma: float) -> None:
    """NoLoCo with N = 2 against the float64 oracle of DiLoCo: the replicas are equal after each exchange, gamma plays no part."""
    pair = {"peers": 2, "steps": 12, "inner_steps": 4, "blocks_per_fragment": 2, "alpha": 0.5, "beta": 0.7, "gamma": gamma}
    population = small_population(small_scenario(method="noloco", matching="scheduled", **pair))
    table = Gossip(population, noloco_rule(population.scenario), matcher(population.scenario, 2))
    exchanged = []
    for now in range(1, 13):
        step(population, table, 0, 1)
        before = [[as_oracles(outer, fragment) for outer in table.outers] for fragment in range(2)]
        table.boundary(Fraction(now), [0, 1])
        for fragment, group in enumerate(before):
            after = [as_oracles(outer, fragment) for outer in table.outers]
            if after[0] != group[0]:
                exchanged.append((now, fragment))
                wanted = [reference.diloco_heavy_ball(list(peers), 0.7, 0.5) for peers in zip(*group, strict=True)]
                assert values_of(after) == pytest.approx(values_of(list(zip(*wanted, strict=True))), abs=1e-6)
    assert exchanged == [(2, 0), (4, 1), (6, 0), (8, 1), (10, 0), (12, 1)]


def as_oracles(outer: Outer, fragment: int) -> list[reference.Replica]:
    """Some coordinates of a fragment as the oracle has them."""
    vectors = (outer.slow[fragment], outer.momentum[fragment], outer.fast(fragment))
    return [reference.Replica(*at) for at in zip(*(vector[:NUM_CHECKED].tolist() for vector in vectors), strict=True)]


def values_of(peers: Sequence[Sequence[reference.Replica]]) -> list[float]:
    return [value for peer in peers for one in peer for value in (one.phi, one.delta, one.theta)]


def test_a_swarm_of_two_takes_the_steps_of_diloco() -> None:
    population, table, _ = by_hand(steps=20)
    grouped = small_population(small_scenario(peers=2, steps=20, method="diloco-heavy-ball", alpha=0.5, beta=0.7))
    exchanges = training(grouped)
    for now in range(1, 9):
        step(population, table, 0, 1)
        if now % 4 == 0:
            for fragment in range(3):
                table.begin(0, 1, fragment)
        table.boundary(Fraction(now), [0, 1])
        next(exchanges)
    for peer in range(2):
        assert furthest(population.replicas[peer].weights, grouped.replicas[peer].weights) < 1e-5


@pytest.mark.parametrize("matching", ["on-demand", "scheduled"])
def test_equal_seeds_give_equal_swarms(matching: str) -> None:
    choices = {"matching": matching, "codec": "modulo4", "speeds": (Fraction(4), Fraction(1)), "delay": Fraction(3, 2), "drop_out": 0.2}
    first, second = trained(**choices), trained(**choices)
    assert all(torch.equal(*both) for both in zip(weights(first), weights(second), strict=True))
    assert first.traffic == second.traffic
    assert not torch.equal(weights(trained(**choices, seed=1))[0], weights(first)[0])


def test_speeds_decide_the_steps_but_not_the_tokens() -> None:
    population = trained(steps=20, speeds=(Fraction(4), Fraction(1)))
    assert [replica.own_steps for replica in population.replicas] == [32, 8, 32, 8]
    assert all(replica.clock_steps >= replica.own_steps for replica in population.replicas)
    assert population.replicas[1].clock_steps > 8  # it heard of the faster ones


def test_swarms_that_meet_are_nearer_than_lone_peers() -> None:
    def spread(method: str) -> float:
        one, two = weights(trained(method=method, steps=24))[:2]
        return furthest(one, two)

    assert spread("noloco") < 0.5 * spread("local")


def test_an_exchange_takes_its_time_and_training_goes_on() -> None:
    population, table, matcher = by_hand(delay=Fraction(2))
    step(population, table, 0, 1)
    table.begin(0, 1, 0)
    table.boundary(Fraction(1), [0, 1])
    slow = table.outers[0].slow[0].clone()
    step(population, table, 0, 1)
    table.boundary(Fraction(2), [0, 1])
    assert torch.equal(table.outers[0].slow[0], slow)
    assert not table.is_free(0, 0)
    step(population, table, 0, 1)
    table.boundary(Fraction(3), [0, 1])
    assert not torch.equal(table.outers[0].slow[0], slow)
    assert table.is_free(0, 0)
    assert matcher.steps == [(0, 0), (1, 0)]
    assert table.outers[0].tokens[0] == 2 * 32


def test_a_slow_partner_answers_at_its_own_step_boundary() -> None:
    population, table, matcher = by_hand()
    step(population, table, 0)
    table.begin(0, 1, 0)
    table.boundary(Fraction(1), [0])
    assert population.traffic.sent_bytes == 0
    step(population, table, 1)
    table.boundary(Fraction(2), [1])
    assert population.traffic.sent_bytes > 0
    assert matcher.steps == [(1, 0)]  # the first one hears at its next boundary
    step(population, table, 0)
    table.boundary(Fraction(3), [0])
    assert matcher.steps == [(1, 0), (0, 0)]
    assert population.traffic.completed == 1


def away_from(population: Population, peer: int) -> Fraction:
    """A time when this peer is away and peer 0 is not."""
    times = (Fraction(n) for n in range(4, 4000, 4))
    return next(now for now in times if population.presence.is_away(peer, now) and not population.presence.is_away(0, now))


def test_a_meeting_counts_for_neither_when_a_peer_leaves_before_it_is_decided() -> None:
    population, table, matcher = by_hand(drop_out=0.3, delay=Fraction(10))
    now = away_from(population, 1)
    step(population, table, 0, 1)
    before = [table.outers[peer].slow[0].clone() for peer in range(2)]
    table.begin(0, 1, 0)
    table.boundary(now - 1, [0])
    table.boundary(now, [0, 1])  # both have taken snapshots; 1 goes
    assert population.traffic.dropped == 1
    assert table.is_free(0, 0)
    assert not table.is_free(1, 0)
    table.boundary(now + 20, [0, 1])
    assert all(torch.equal(outer.slow[0], want) for outer, want in zip(table.outers, before, strict=False))
    assert matcher.steps == []


def test_a_meeting_that_a_partner_has_applied_counts_for_who_leaves_too() -> None:
    population, table, matcher = by_hand(drop_out=0.3, delay=Fraction(1))
    now = away_from(population, 1)
    step(population, table, 0, 1)
    table.begin(0, 1, 0)
    table.boundary(now - 2, [0, 1])
    table.boundary(now - 1, [0])
    table.boundary(now, [1])  # applies, then goes
    assert sorted(matcher.steps) == [(0, 0), (1, 0)]
    assert (population.traffic.completed, population.traffic.dropped) == (1, 0)


def test_a_swarm_trains_on_through_churn() -> None:
    population = trained(steps=40, drop_out=0.3, codec="modulo4", delay=Fraction(1))
    assert population.traffic.completed > 10
    assert population.traffic.dropped + population.traffic.solo >= 1
    assert all(bool(torch.isfinite(vector).all()) for vector in weights(population))
