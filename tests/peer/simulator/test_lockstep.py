from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from peer.simulator.lockstep import slowest_step, steps_together
from peer.simulator.timeline import step_ends
from tests.peer.simulator.swarms import furthest, small_population, small_scenario, trained, training


def test_all_take_the_same_steps_and_wait_for_the_slowest() -> None:
    population = small_population(small_scenario(method="ddp", steps=3, speeds=(Fraction(4), Fraction(1))))
    assert list(steps_together(population)) == [(1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (3, [0, 1, 2, 3])]
    assert slowest_step(population.scenario) == Fraction(5, 2)
    assert list(training(population)) == [Fraction(5, 2), 5, Fraction(15, 2)]


def test_each_step_of_data_parallel_training_waits_for_its_exchange() -> None:
    population = small_population(small_scenario(method="ddp", steps=3, speeds=(Fraction(4), Fraction(1)), delay=Fraction(1, 2)))
    assert list(training(population)) == [3, 6, 9]


def test_who_is_away_does_not_step() -> None:
    population = small_population(small_scenario(method="ddp", steps=40, drop_out=0.4))
    present = [len(peers) for _, peers in steps_together(population)]
    assert min(present) < 4
    assert present[:4] == [4, 4, 4, 4]  # step 4 begins in the first period, which is everybody's


def test_absences_are_those_of_pairs() -> None:
    """Peers of equal speed take the same steps in a group and in pairs: an absence begins after the exchange that ends a period."""
    population = small_population(small_scenario(method="ddp", steps=80, drop_out=0.5))
    together = [(Fraction(step), peers) for step, peers in steps_together(population) if peers]
    in_pairs = [(now, sorted(peers)) for now, peers in step_ends([Fraction(1)] * 4, 80, population.presence)]
    assert together == in_pairs
    assert len({tuple(peers) for _, peers in together}) > 4


def test_data_parallel_training_of_one_peer_is_plain_training() -> None:
    one, lone = trained(method="ddp", peers=1), trained(method="local", peers=1)
    assert torch.equal(one.replicas[0].weights, lone.replicas[0].weights)


def test_data_parallel_training_is_one_peer_with_all_batches() -> None:
    """Four peers' mean gradient against one backward pass over the four batches together."""
    population = small_population(small_scenario(method="ddp", steps=5))
    together = small_population(small_scenario(method="local", peers=1, steps=5)).replicas[0]
    for step, _ in enumerate(training(population)):
        batches = [batches.batch(step) for batches in population.texts.batches]
        together.add_gradient(Whole(torch.cat(batches)), 0)
        together.apply_gradient()
    assert len(population.replicas) == 1
    assert furthest(population.replicas[0].weights, together.weights) < 1e-5


class Whole:
    def __init__(self, batch: torch.Tensor) -> None:
        self._batch = batch

    def batch(self, step: int) -> torch.Tensor:
        return self._batch


@pytest.mark.parametrize("codec", ["int8", "topk", "modulo4"])
def test_gradients_can_be_coded(codec: str) -> None:
    coded, exact = trained(method="ddp", codec=codec), trained(method="ddp")
    assert not torch.equal(coded.replicas[0].weights, exact.replicas[0].weights)
    assert coded.traffic.sent_bytes < 0.6 * exact.traffic.sent_bytes
    assert exact.traffic.sent_bytes == 12 * 4 * 4 * exact.layout.numel
    assert coded.traffic.completed == 12
