"""What must hold for a whole population that meets in random pairs (docs/concepts/mathematics.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gossamer.optim.codecs import CODECS, codec
from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.fragments import Fragment, Piece
from gossamer.optim.noloco import NoLoCo


class Unchecked(NoLoCo):
    """NoLoCo that may drift apart."""

    def __post_init__(self) -> None:
        pass


@dataclass
class Population:
    """Slow weights and momentum of N peers with pure-noise progress: f64 or f32 [peers, values]."""

    slow: Tensor
    momentum: Tensor
    generator: torch.Generator

    @staticmethod
    def start(peers: int, values: int, seed: int = 0) -> Population:
        zeros = torch.zeros(peers, values)
        return Population(zeros, zeros, torch.Generator().manual_seed(seed))

    def round(self, rule: NoLoCo) -> None:
        fast = self.slow + torch.randn(self.slow.shape, generator=self.generator)
        u = rule.message(self.slow, fast, 0.5)
        order = torch.randperm(len(u), generator=self.generator)
        partner = torch.empty_like(order)
        half = len(order) // 2
        partner[order[:half]], partner[order[half:]] = order[half:], order[:half]
        self.slow, self.momentum = rule.pair_step(self.slow, self.momentum, fast, 0.5, u[partner] - u)

    def variance(self) -> float:
        return float((self.slow - self.slow.mean(0)).square().mean())


def stationary_variance(peers: int, rule: NoLoCo, values: int, rounds: int) -> float:
    population = Population.start(peers, values)
    for _ in range(60):
        population.round(rule)
    total = 0.0
    for _ in range(rounds):
        population.round(rule)
        total += population.variance()
    return total / rounds


@pytest.mark.parametrize(("peers", "expected"), [(4, 0.43), (8, 0.81), (16, 1.05), (32, 1.18), (64, 1.24)])
def test_variance_of_a_finite_population(peers: int, expected: float) -> None:
    # Few peers have few matchings, and all values share them: average over many rounds rather than many values.
    measured = stationary_variance(peers, NoLoCo(), values=8192 // peers, rounds=40_000 // peers)
    assert measured == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("alpha", "gamma", "expected"), [(0.0, 1.0, 0.49), (0.3, 0.91, 0.77), (0.5, 0.75, 1.31), (0.7, 0.51, 3.20)])
def test_variance_of_a_large_population(alpha: float, gamma: float, expected: float) -> None:
    measured = stationary_variance(1024, NoLoCo(alpha, 0.7, gamma), values=32, rounds=100)
    assert measured == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("alpha", "gamma", "bounded"), [(0.5, 1.45, True), (0.5, 1.55, False), (0.9, 0.35, True), (0.9, 0.5, False)])
def test_divergence_bounds(alpha: float, gamma: float, bounded: bool) -> None:
    rule = Unchecked(alpha, 0.7, gamma)
    population = Population.start(512, 64)
    for _ in range(1000):
        population.round(rule)
    assert (population.variance() < 1000) is bounded


def coded_meeting(
    name: str, slow: Tensor, momentum: Tensor, fast: Tensor, weights: tuple[float, float]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """One meeting through a codec; returns both outcomes and the values that failed."""
    rule = NoLoCo()
    fragment = Fragment(0, "f", (Piece("large", slow.shape[1] - 100), Piece("small", 100)), slow.shape[1] - 100)
    coder = FragmentCodec(fragment, codec(name))
    u = [rule.message(slow[k], fast[k], weights[k]) for k in (0, 1)]
    sketches = [coder.sketch(x, 77) for x in u]
    encoded = [coder.encode(u[k], 77, sketches[k], sketches[1 - k]) for k in (0, 1)]
    gaps = [coder.gap(encoded[k], encoded[1 - k].payload) for k in (0, 1)]
    assert torch.equal(gaps[0].values, -gaps[1].values)
    assert torch.equal(gaps[0].failed, gaps[1].failed)
    failed = coder.failed_values(gaps[0].failed | gaps[1].failed)
    steps = [rule.pair_step(slow[k], momentum[k], fast[k], weights[k], gaps[k].values, failed) for k in (0, 1)]
    return steps[0], steps[1], torch.zeros(slow.shape[1], dtype=torch.bool) if failed is None else failed


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("spread", [1e-3, 0.05, 30.0])
def test_a_pairs_weighted_mean_moves_as_if_nothing_were_coded(name: str, spread: float) -> None:
    generator = torch.Generator().manual_seed(8)
    values = 5000
    slow = torch.randn(1, values, generator=generator) + spread * torch.randn(2, values, generator=generator)
    momentum = 0.1 * torch.randn(2, values, generator=generator)
    fast = slow + spread * torch.randn(2, values, generator=generator)
    weights = (0.75, 0.25)
    first, second, failed = coded_meeting(name, slow, momentum, fast, weights)
    g = (slow - fast).double()
    shares = torch.where(failed, 0.5, torch.tensor(weights)[:, None]).double()
    expected = 0.5 * momentum.double().mean(0) - 0.7 * (shares * g).sum(0)
    mean = (first[1].double() + second[1].double()) / 2
    assert float((mean - expected).abs().max()) < 1e-6 * max(1.0, spread * 4)


@pytest.mark.parametrize("name", CODECS)
def test_the_population_mean_moves_as_if_nothing_were_coded(name: str) -> None:
    """Random pairs, odd numbers, peers that sit out: the mean obeys its equation whatever the codec."""
    generator = torch.Generator().manual_seed(11)
    peers, values = 7, 4500
    slow = torch.randn(1, values, generator=generator).repeat(peers, 1)
    momentum = torch.zeros(peers, values)
    mean_slow, mean_momentum = slow[0].double(), torch.zeros(values, dtype=torch.float64)
    for _ in range(6):
        fast = slow + 0.02 * torch.randn(slow.shape, generator=generator)
        mean_momentum = 0.5 * mean_momentum + 0.7 * (fast - slow).double().mean(0)
        mean_slow = mean_slow + mean_momentum
        order = torch.randperm(peers, generator=generator).tolist()
        alone, pairs = order[:3], [tuple(order[3:5]), tuple(order[5:7])]
        outcome = {peer: NoLoCo().solo_step(slow[peer], momentum[peer], fast[peer]) for peer in alone}
        for pair in pairs:
            rows = list(pair)
            outcome[rows[0]], outcome[rows[1]], _ = coded_meeting(name, slow[rows], momentum[rows], fast[rows], (0.5, 0.5))
        slow = torch.stack([outcome[peer][0] for peer in range(peers)])
        momentum = torch.stack([outcome[peer][1] for peer in range(peers)])
    error = (slow.double().mean(0) - mean_slow).abs().max()
    assert float(error) < 2e-6
    assert math.isfinite(float(slow.sum()))
