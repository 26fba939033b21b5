from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peer.simulator.replicas import Diverged, coding
from tests.peer.simulator.swarms import small_population, small_scenario
from tests.peer.small import small_replica


def test_the_model_is_a_view_of_the_flat_weights() -> None:
    replica = small_population(small_scenario()).replicas[0]
    before = {name: parameter.detach().clone() for name, parameter in replica.parameters.items()}
    replica.weights.add_(1.0)
    assert all(torch.equal(parameter, before[name] + 1.0) for name, parameter in replica.parameters.items())
    assert sum(parameter.numel() for parameter in replica.parameters.values()) == replica.weights.numel()


def test_replicas_begin_equal_and_own_their_weights() -> None:
    one, two = small_population(small_scenario()).replicas[:2]
    assert torch.equal(one.weights, two.weights)
    one.weights.zero_()
    assert bool(two.weights.any())


def test_inner_steps_are_those_of_a_real_peer(tmp_path: Path) -> None:
    """The same batches through both: the same weights, bit for bit."""
    population = small_population(small_scenario(steps=60))
    simulated, real = population.replicas[1], small_replica(tmp_path, population.scenario.manifest, b"peer-1")
    for _ in range(8):
        simulated.inner_step()
        real.inner_step()
    assert all(torch.equal(parameter, real.parameters[name]) for name, parameter in simulated.parameters.items())
    assert (simulated.own_steps, simulated.clock_steps) == (real.own_steps, real.clock_steps)


def test_no_gradient_is_kept_between_steps() -> None:
    replica = small_population(small_scenario()).replicas[0]
    replica.inner_step()
    assert replica.gradients() == {}


def test_a_clock_follows_the_partners_within_bounds() -> None:
    replica = small_population(small_scenario(steps=60)).replicas[0]
    replica.hear_clock(50)
    assert replica.clock_steps == 0  # no step of its own yet
    for _ in range(3):
        replica.inner_step()
    replica.hear_clock(50)
    assert replica.clock_steps == 12
    replica.hear_clock(5)
    assert replica.clock_steps == 12


def test_training_that_breaks_says_so() -> None:
    replica = small_population(small_scenario()).replicas[2]
    replica.weights.fill_(float("nan"))
    with pytest.raises(Diverged, match="peer 2 diverged at its inner step 0") as caught:
        replica.inner_step()
    assert "learning_rate" in caught.value.hint


def test_a_codecs_refusal_means_divergence() -> None:
    with pytest.raises(Diverged, match="a pair diverged: not finite"), coding("a pair"):
        raise ValueError("not finite")


def test_muon_can_be_the_inner_optimizer() -> None:
    replica = small_population(small_scenario(optimizer="muon")).replicas[0]
    before = replica.weights.clone()
    replica.inner_step()
    assert not torch.equal(replica.weights, before)
