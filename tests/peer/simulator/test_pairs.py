from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from gossamer.optim.noloco import NoLoCo
from gossamer.peer.link import messages
from gossamer.peer.simulator.hostile import members
from gossamer.peer.simulator.methods import pair_rule
from gossamer.peer.simulator.pairs import Gossip, Matcher, Pair, PairPeer, matcher
from gossamer.peer.simulator.population import Population
from gossamer.peer.simulator.scenario import Scenario
from gossamer.protocol.errors import BadSettings
from tests import reference
from tests.peer.exchange import Side, Terms, checked, exchange, replica_side
from tests.peer.open_gates import open_probes
from tests.peer.simulator.swarms import furthest, small_population, small_scenario, trained, training, weights
from tests.peer.small import AskedReplica, small_manifest, small_replica

SEED = 7


def two(**choices: object) -> tuple[Population, tuple[PairPeer, PairPeer]]:
    population = small_population(small_scenario(peers=2, steps=60, **choices))
    one, other = (PairPeer(replica, population.layout) for replica in population.replicas)
    open_probes([one, other])
    return population, (one, other)


def trusting(population: Population) -> list[PairPeer]:
    """Members that merge whole what their merge gate accepts."""
    peers = members(population)
    open_probes(peers)
    return peers


def train(outer: PairPeer, num_steps: int) -> None:
    for _ in range(num_steps):
        outer.inner_step(32)


def tokens(outer: PairPeer) -> list[int]:
    return [fragment.since.tokens for fragment in outer.fragments]


def met(outers: tuple[PairPeer, PairPeer], fragment: int, rule: NoLoCo) -> Pair:
    pair = Pair(fragment, outers, SEED)
    for outer in outers:
        pair.open(outer)
    assert not pair.exchange(rule, token_weights=True)
    for outer in outers:
        pair.apply(outer)
    return pair


@pytest.mark.parametrize("codec", ["fp32", "int8", "modulo4", "modulo3"])
def test_a_meeting_is_that_of_real_peers_bit_for_bit(tmp_path: Path, codec: str) -> None:
    """Two meetings of each fragment, with uneven progress, beside two real replicas whose bytes are carried by hand."""
    population, outers = two(codec=codec, inner_steps=6)
    rule = pair_rule(population.scenario)
    manifest = small_manifest(codec={"name": codec})
    real = [small_replica(tmp_path / f"{n}", manifest, b"peer-%d" % n) for n in range(2)]
    open_probes([*outers, *real])
    sides = (replica_side(real[0], tmp_path / "0"), replica_side(real[1], tmp_path / "1"))
    for number in range(2 * len(population.layout.codecs)):
        fragment = number % len(population.layout.codecs)
        for outer, replica, num_steps in zip(outers, real, (3, 1), strict=True):
            train(outer, num_steps)
            _train_real(replica, num_steps)
        met(outers, fragment, rule)
        _meet_real(sides, Terms(fragment, number, SEED, name=f"{number:032x}"))
    for outer, replica in zip(outers, real, strict=True):
        assert all(torch.equal(parameter, replica.parameters[name]) for name, parameter in outer.replica.parameters.items())
        assert tokens(outer) == [fragment.since.tokens for fragment in replica.fragments]
        assert outer.replica.global_step == replica.global_step


def _train_real(replica: AskedReplica, num_steps: int) -> None:
    for _ in range(num_steps):
        replica.inner_step()


def _meet_real(sides: tuple[Side, Side], terms: Terms) -> None:
    exchange(sides, terms)
    bitmaps = [bytes.fromhex(checked(side, terms.number).failed_blocks) for side in sides]
    union = bytes(one | other for one, other in zip_longest(*bitmaps, fillvalue=0)).hex()
    for side in sides:
        assert side.answer(messages.Apply(terms.number, terms.name, union)) == messages.Applied(terms.number)


def test_steps_made_since_the_snapshot_are_kept() -> None:
    population, outers = two()
    rule = pair_rule(population.scenario)
    for outer in outers:
        train(outer, 2)
    pair = Pair(0, outers, SEED)
    for outer in outers:
        pair.open(outer)
    pair.exchange(rule, token_weights=True)
    snapshot = outers[0].fragments[0].fast()
    train(outers[0], 3)
    progress = outers[0].fragments[0].fast() - snapshot
    pair.apply(outers[0])
    assert furthest(outers[0].fragments[0].fast(), outers[0].fragments[0].slow + progress) < 1e-6
    assert tokens(outers[0]) == [3 * 32, 5 * 32, 5 * 32]


def test_the_pairs_mean_moves_as_if_nothing_were_coded() -> None:
    means = []
    for codec in ("fp32", "modulo3"):
        population, outers = two(codec=codec, inner_steps=6)
        open_probes(outers)
        for outer, num_steps in zip(outers, (3, 1), strict=True):
            train(outer, num_steps)
        met(outers, 1, pair_rule(population.scenario))
        means.append((outers[0].fragments[1].slow.double() + outers[1].fragments[1].slow.double()) / 2)
    assert furthest(*means) < 1e-6


def test_both_sides_take_the_solo_step_for_blocks_that_fail_on_one() -> None:
    """Peers that are far apart in one value: its block's window does not fit, so that block does not decode."""
    population, outers = two(codec="modulo4")
    rule = pair_rule(population.scenario)
    for outer in outers:
        train(outer, 2)
    outers[0].replica.weights[population.layout.slices[0]][:1024] += torch.linspace(-0.02, 0.02, 1024).pow(3) * 1e4
    states = [outer.fragments[0] for outer in outers]
    alone = [rule.solo_step(state.slow, state.momentum, state.fast())[0] for state in states]
    pair = met(outers, 0, rule)
    assert pair.failed_blocks is not None
    failed = states[0].codec.failed_values(pair.failed_blocks)
    assert failed is not None
    for state, want in zip(states, alone, strict=True):
        assert torch.equal(state.slow[failed], want[failed])


def test_alone_a_peer_restarts_from_its_slow_weights() -> None:
    population, (outer, _) = two()
    train(outer, 3)
    outer.solo_step(2, pair_rule(population.scenario))
    assert furthest(outer.fragments[2].fast(), outer.fragments[2].slow) < 1e-7
    assert tokens(outer) == [96, 96, 0]
    assert weights(population)[0].shape == (population.layout.numel,)


# ---------------------------------------------------------------------- all meetings

NUM_CHECKED = 40  # values compared with the oracle, one by one


class Nobody:
    """A matcher that starts nothing and counts the outer steps it hears of."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.num_counted: list[int] = []

    def arrange(self, now: Fraction, arrived: object, floor: object) -> None:
        pass

    def note_outer_step(self, peer: int, fragment: int, num_steps: int = 0, *, is_met: bool = True) -> None:
        self.steps.append((peer, fragment))
        self.num_counted.append(num_steps)


def by_hand(**choices: object) -> tuple[Population, Gossip, Nobody]:
    """A swarm whose meetings the test begins."""
    population = small_population(small_scenario(peers=3, **choices))
    matcher: Matcher = Nobody()
    assert isinstance(matcher, Nobody)
    return population, Gossip(population, pair_rule(population.scenario), matcher, trusting(population)), matcher


def step(population: Population, table: Gossip, *peers: int) -> None:
    for peer in peers:
        table.peers[peer].inner_step(32)


@pytest.mark.parametrize("gamma", [0.7, 1.2])
def test_a_swarm_of_two_that_meets_on_schedule_is_heavy_ball_diloco(gamma: float) -> None:
    """NoLoCo with N = 2 against the float64 oracle of DiLoCo: the replicas are equal after each exchange, gamma plays no part."""
    pair = {"peers": 2, "steps": 12, "inner_steps": 4, "blocks_per_fragment": 2, "alpha": 0.5, "beta": 0.7, "gamma": gamma}
    population = small_population(small_scenario(method="noloco", matching="scheduled", **pair))
    table = Gossip(population, pair_rule(population.scenario), matcher(population.scenario, 2), trusting(population))
    exchanged = []
    for now in range(1, 13):
        step(population, table, 0, 1)
        before = [[as_oracles(outer, fragment) for outer in table.peers] for fragment in range(2)]
        table.boundary(Fraction(now), [0, 1])
        for fragment, group in enumerate(before):
            after = [as_oracles(outer, fragment) for outer in table.peers]
            if after[0] != group[0]:
                exchanged.append((now, fragment))
                wanted = [reference.diloco_heavy_ball(list(peers), 0.7, 0.5) for peers in zip(*group, strict=True)]
                assert values_of(after) == pytest.approx(values_of(list(zip(*wanted, strict=True))), abs=1e-6)
    assert exchanged == [(2, 0), (4, 1), (6, 0), (8, 1), (10, 0), (12, 1)]


def as_oracles(outer: PairPeer, fragment: int) -> list[reference.Replica]:
    """Some coordinates of a fragment as the oracle has them."""
    vectors = (outer.fragments[fragment].slow, outer.fragments[fragment].momentum, outer.fragments[fragment].fast())
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
    choices |= {"peers": 3, "steps": 8}
    first, second = trained(**choices), trained(**choices)
    assert all(torch.equal(*both) for both in zip(weights(first), weights(second), strict=True))
    assert first.traffic == second.traffic
    assert not torch.equal(weights(trained(**choices, seed=1))[0], weights(first)[0])


def test_speeds_decide_the_steps_but_not_the_tokens() -> None:
    population = trained(steps=10, speeds=(Fraction(4), Fraction(1)))
    assert [replica.own_steps for replica in population.replicas] == [16, 4, 16, 4]
    assert all(replica.global_step >= replica.own_steps for replica in population.replicas)
    assert population.replicas[1].global_step > 4  # it heard of the faster ones


def test_swarms_that_meet_are_nearer_than_lone_peers() -> None:
    def spread(method: str) -> float:
        one, two = weights(trained(method=method, steps=16))[:2]
        return furthest(one, two)

    assert spread("noloco") < 0.5 * spread("local")


def test_an_exchange_takes_its_time_and_training_goes_on() -> None:
    population, table, matcher = by_hand(delay=Fraction(2))
    step(population, table, 0, 1)
    table.begin(0, 1, 0)
    table.boundary(Fraction(1), [0, 1])
    slow = table.peers[0].fragments[0].slow.clone()
    step(population, table, 0, 1)
    table.boundary(Fraction(2), [0, 1])
    assert torch.equal(table.peers[0].fragments[0].slow, slow)
    assert not table.is_free(0, 0)
    step(population, table, 0, 1)
    table.boundary(Fraction(3), [0, 1])
    assert not torch.equal(table.peers[0].fragments[0].slow, slow)
    assert table.is_free(0, 0)
    assert matcher.steps == [(0, 0), (1, 0)]
    assert matcher.num_counted == [1, 1], "the next countdown has begun with the snapshot, as that of real peers"
    assert tokens(table.peers[0])[0] == 2 * 32


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
    return next(now for now in times if population.scenario.is_away(peer, now) and not population.scenario.is_away(0, now))


def test_a_meeting_counts_for_neither_when_a_peer_leaves_before_it_is_decided() -> None:
    population, table, matcher = by_hand(drop_out=0.3, delay=Fraction(10))
    now = away_from(population, 1)
    step(population, table, 0, 1)
    before = [table.peers[peer].fragments[0].slow.clone() for peer in range(2)]
    table.begin(0, 1, 0)
    table.boundary(now - 1, [0])
    table.boundary(now, [0, 1])  # both have taken snapshots; 1 goes
    assert population.traffic.dropped == 1
    assert table.is_free(0, 0)
    assert not table.is_free(1, 0)
    table.boundary(now + 20, [0, 1])
    assert all(torch.equal(outer.fragments[0].slow, want) for outer, want in zip(table.peers, before, strict=False))
    assert matcher.steps == []


def test_a_meeting_that_a_partner_has_applied_counts_for_a_leaving_peer_too() -> None:
    population, table, matcher = by_hand(drop_out=0.3, delay=Fraction(1))
    now = away_from(population, 1)
    step(population, table, 0, 1)
    table.begin(0, 1, 0)
    table.boundary(now - 2, [0, 1])
    table.boundary(now - 1, [0])
    table.boundary(now, [1])  # applies, then goes
    assert sorted(matcher.steps) == [(0, 0), (1, 0)]
    assert (population.traffic.completed, population.traffic.dropped) == (1, 0)


def test_a_message_that_the_gate_refuses_counts_for_neither_and_leaves_both_free() -> None:
    population, table, matcher = by_hand(delay=Fraction(1))
    step(population, table, 0, 1)
    first = population.layout.slices[0]
    population.replicas[1].weights[first] += 100.0  # no honest training leads so far
    before = [table.peers[peer].fragments[0].slow.clone() for peer in range(2)]
    table.begin(0, 1, 0)
    table.boundary(Fraction(1), [0, 1])
    assert not table.is_free(0, 0), "the refusal takes its time, too"
    table.boundary(Fraction(2), [0])
    assert (population.traffic.completed, population.traffic.refused, population.traffic.dropped) == (0, 1, 0)
    assert population.traffic.sent_bytes == 2 * 4 * before[0].numel()
    assert table.is_free(0, 0) and table.is_free(1, 0)
    assert matcher.steps == [], "it stays due"
    assert all(torch.equal(peer.fragments[0].slow, want) for peer, want in zip(table.peers, before, strict=False))
    population.replicas[1].weights[first] -= 100.0
    table.begin(0, 1, 0)
    for now in (2, 3):
        table.boundary(Fraction(now), [0, 1])
    assert (population.traffic.completed, population.traffic.refused) == (1, 1)


def test_a_swarm_trains_on_through_churn() -> None:
    population = trained(steps=24, drop_out=0.3, codec="modulo4", delay=Fraction(1))
    assert population.traffic.completed > 10
    assert population.traffic.dropped + population.traffic.solo >= 1
    assert all(bool(torch.isfinite(vector).all()) for vector in weights(population))


# ---------------------------------------------------------------------- the rules

DRAWS = torch.Generator().manual_seed(2)
SLOW, MOMENTUM, FAST, GAP = (torch.randn(50, generator=DRAWS) for _ in range(4))


def made(**outer: float) -> Scenario:
    return Scenario(small_manifest(outer={"method": "local", **outer}))


def test_constants_come_from_the_manifest() -> None:
    assert pair_rule(made(alpha=0.3, beta=0.6, gamma=0.9)) == NoLoCo(0.3, 0.6, 0.9)


def test_outside_the_stable_range_is_refused() -> None:
    with pytest.raises(BadSettings, match="gamma must satisfy"):
        pair_rule(made(gamma=1.6))
