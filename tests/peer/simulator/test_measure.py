from __future__ import annotations

import pytest
import torch

from peer.model.evaluation import held_out_loss
from peer.simulator.measure import averaged_loss, losses, mean_weights, weight_std
from tests.peer.simulator.swarms import small_population, small_scenario


def test_the_mean_and_the_distance_from_it() -> None:
    replicas = small_population(small_scenario(peers=2)).replicas
    replicas[0].weights.fill_(1.0)
    replicas[1].weights.fill_(3.0)
    assert torch.equal(mean_weights(replicas), torch.full_like(replicas[0].weights, 2.0))
    assert weight_std(replicas) == pytest.approx(1.0)
    assert weight_std(replicas[:1]) == 0.0


def test_equal_replicas_are_their_mean_exactly() -> None:
    replicas = small_population(small_scenario(peers=3)).replicas
    assert weight_std(replicas) == 0.0
    assert torch.equal(mean_weights(replicas), replicas[1].weights)


def test_the_average_is_measured_without_touching_a_replica() -> None:
    population = small_population(small_scenario(peers=2))
    one, two = population.replicas
    one.inner_step()
    two.inner_step()
    held_out, before = population.texts.held_out, one.weights.clone()
    mean = mean_weights(population.replicas)
    averaged = averaged_loss(population.replicas, held_out, 2)
    assert torch.equal(one.weights, before)
    one.weights.copy_(mean)
    assert averaged == held_out_loss(one.model, held_out, 2)


def test_each_replica_is_measured() -> None:
    population = small_population(small_scenario(peers=2))
    population.replicas[1].inner_step()
    one, two = losses(population.replicas, population.texts.held_out, 2)
    assert one != two
