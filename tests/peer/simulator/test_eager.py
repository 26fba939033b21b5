from __future__ import annotations

from functools import partial

import pytest

from tests.peer.simulator.swarms import furthest, small_population, small_scenario, trained, training, weights


def test_alone_it_is_diloco() -> None:
    eager, plain = (trained(method=method, peers=1) for method in ("diloco-eager", "diloco"))
    assert furthest(eager.replicas[0].weights, plain.replicas[0].weights) < 1e-5


def test_ones_own_part_counts_at_once_and_the_others_a_round_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that move by a constant c each step, plain outer step: 2c after one round, then both by the mean of all."""
    population = small_population(small_scenario(method="diloco-eager", alpha=0.0, beta=1.0, peers=2, steps=8))
    start, drifts = weights(population)[0], (0.01, 0.03)
    for replica, drift in zip(population.replicas, drifts, strict=True):
        monkeypatch.setattr(replica, "inner_step", partial(replica.weights.add_, drift))
    for now in training(population):
        moved = [float((replica.weights - start).mean()) for replica in population.replicas]
        if now == 4:
            assert moved == pytest.approx([2 * drift for drift in drifts], abs=1e-5)
    assert moved == pytest.approx([2 * drift + 2 * sum(drifts) for drift in drifts], abs=1e-5)


def test_it_learns_and_counts_what_it_sends() -> None:
    population = trained(method="diloco-eager", steps=12)
    assert population.traffic.completed == 3
    assert population.traffic.sent_bytes == 3 * 4 * 4 * population.layout.numel
