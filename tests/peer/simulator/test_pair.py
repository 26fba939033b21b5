from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from peer.link import records as ask
from peer.simulator.pair import Outer, Pair
from peer.simulator.population import Population
from peer.simulator.rules import NoLoCo, noloco_rule
from peer.trainer.replica import Replica as RealReplica
from tests.peer.exchange import Side, Terms, checked, exchange, replica_side
from tests.peer.simulator.swarms import furthest, small_population, small_scenario, weights
from tests.peer.small import small_manifest, small_replica

SEED = 7


def two(**choices: object) -> tuple[Population, tuple[Outer, Outer]]:
    population = small_population(small_scenario(peers=2, steps=60, **choices))
    one, other = (Outer(replica, population.layout) for replica in population.replicas)
    return population, (one, other)


def train(outer: Outer, num_steps: int) -> None:
    for _ in range(num_steps):
        outer.replica.inner_step()
        outer.count_tokens(32)


def met(outers: tuple[Outer, Outer], fragment: int, rule: object) -> Pair:
    pair = Pair(fragment, outers, SEED)
    for outer in outers:
        pair.open(outer)
    assert isinstance(rule, NoLoCo)
    pair.exchange(rule, token_weights=True)
    for outer in outers:
        pair.apply(outer.replica.number, rule)
    return pair


@pytest.mark.parametrize("codec", ["fp32", "int8", "modulo4", "modulo3"])
def test_a_meeting_is_that_of_real_peers_bit_for_bit(tmp_path: Path, codec: str) -> None:
    """Two meetings of each fragment, with uneven progress, beside two real replicas whose bytes are carried by hand."""
    population, outers = two(codec=codec, inner_steps=6)
    rule = noloco_rule(population.scenario)
    manifest = small_manifest(codec={"name": codec})
    real = [small_replica(tmp_path / f"{n}", manifest, b"peer-%d" % n) for n in range(2)]
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
        assert outer.tokens == [fragment.tokens for fragment in replica.outer.fragments]
        assert outer.replica.clock_steps == replica.clock_steps


def _train_real(replica: RealReplica, num_steps: int) -> None:
    for _ in range(num_steps):
        replica.inner_step()


def _meet_real(sides: tuple[Side, Side], terms: Terms) -> None:
    exchange(sides, terms)
    bitmaps = [bytes.fromhex(checked(side, terms.number).failed_blocks) for side in sides]
    union = bytes(one | other for one, other in zip_longest(*bitmaps, fillvalue=0)).hex()
    for side in sides:
        assert side.answer(ask.Apply(terms.number, terms.name, union)) == ask.Applied(terms.number)


def test_steps_made_since_the_snapshot_are_kept() -> None:
    population, outers = two()
    rule = noloco_rule(population.scenario)
    for outer in outers:
        train(outer, 2)
    pair = Pair(0, outers, SEED)
    for outer in outers:
        pair.open(outer)
    pair.exchange(rule, token_weights=True)
    snapshot = outers[0].fast(0).clone()
    train(outers[0], 3)
    progress = outers[0].fast(0) - snapshot
    pair.apply(0, rule)
    assert furthest(outers[0].fast(0), outers[0].slow[0] + progress) < 1e-6
    assert outers[0].tokens == [3 * 32, 5 * 32, 5 * 32]


def test_the_pairs_mean_moves_as_if_nothing_were_coded() -> None:
    means = []
    for codec in ("fp32", "modulo3"):
        population, outers = two(codec=codec, inner_steps=6)
        for outer, num_steps in zip(outers, (3, 1), strict=True):
            train(outer, num_steps)
        met(outers, 1, noloco_rule(population.scenario))
        means.append((outers[0].slow[1].double() + outers[1].slow[1].double()) / 2)
    assert furthest(*means) < 1e-6


def test_blocks_that_fail_on_one_side_are_taken_alone_by_both() -> None:
    """Peers that are far apart in one value: its block's window does not fit, so that block does not decode."""
    population, outers = two(codec="modulo4")
    rule = noloco_rule(population.scenario)
    for outer in outers:
        train(outer, 2)
    outers[0].fast(0)[:1024] += torch.randn(1024, generator=torch.Generator().manual_seed(1)) * torch.arange(1024).square()
    alone = [rule.solo_step(outer.slow[0], outer.momentum[0], outer.fast(0))[0] for outer in outers]
    pair = met(outers, 0, rule)
    if pair.failed is not None:
        for outer, want in zip(outers, alone, strict=True):
            assert torch.equal(outer.slow[0][pair.failed], want[pair.failed])
    assert pair.failed is not None


def test_alone_a_peer_restarts_from_its_slow_weights() -> None:
    population, (outer, _) = two()
    train(outer, 3)
    outer.solo(2, noloco_rule(population.scenario))
    assert torch.equal(outer.fast(2), outer.slow[2])
    assert outer.tokens == [96, 96, 0]
    assert weights(population)[0].shape == (population.layout.numel,)
