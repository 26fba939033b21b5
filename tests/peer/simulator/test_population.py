from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gossamer.peer.simulator import population as module
from gossamer.peer.simulator.population import Diverged, Size, coding, free_bytes, need_memory
from gossamer.protocol.errors import BadManifest, BadSettings
from tests.peer.simulator.swarms import small_population, small_scenario
from tests.peer.small import LLAMA, small_replica

CPU = torch.device("cpu")


def test_replicas_are_what_the_scenario_asks_for() -> None:
    population = small_population(small_scenario(peers=3))
    assert [replica.number for replica in population.replicas] == [0, 1, 2]
    assert population.layout.numel == sum(parameter.numel() for parameter in population.replicas[0].model.parameters())
    assert population.layout.bits_per_value == 32.0


def test_more_replicas_than_fit_are_refused_with_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda device: 50_000_000)
    need_memory(small_scenario(), CPU, Size(4, 2, 0))
    with pytest.raises(BadSettings, match=r"1000 replicas of \d+ parameters need about 1\.\d GB, and 0\.1 GB are free") as caught:
        need_memory(small_scenario(), CPU, Size(1000, 2, 0))
    fits = int(caught.value.hint.split()[1])
    need_memory(small_scenario(), CPU, Size(fits, 2, 0))
    with pytest.raises(BadSettings):
        need_memory(small_scenario(), CPU, Size(fits + 1, 2, 0))


@pytest.mark.parametrize("one_replica", [True, False])
def test_error_feedback_is_counted_per_peer(monkeypatch: pytest.MonkeyPatch, *, one_replica: bool) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda device: 50_000_000)
    plain, kept = Size(1000, 0, 1, 0, one_replica), Size(1000, 0, 1, 1, one_replica)
    assert kept.num_vectors - plain.num_vectors == 1000
    with pytest.raises(BadSettings, match="with error feedback for 1000 peers, need about") as caught:
        need_memory(small_scenario(), CPU, kept)
    fits = int(caught.value.hint.split()[1])
    need_memory(small_scenario(), CPU, replace(kept, num_peers=fits))
    need_memory(small_scenario(), CPU, replace(plain, num_peers=fits))
    with pytest.raises(BadSettings):
        need_memory(small_scenario(), CPU, replace(kept, num_peers=fits + 1))


def test_a_model_that_does_not_fit_at_all_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda device: 100_000)
    with pytest.raises(BadSettings) as caught:
        need_memory(small_scenario(), CPU, Size(1, 0, 0))
    assert "smaller model" in caught.value.hint


def test_this_machine_has_some_memory() -> None:
    assert free_bytes(CPU) > 1_000_000


def test_a_model_too_small_for_the_text_is_refused() -> None:
    made = small_scenario(sequence_length=33)
    assert made.manifest.inner.sequence_length > LLAMA["max_position_embeddings"]
    with pytest.raises(BadManifest):
        small_population(made)


# ---------------------------------------------------------------------- replicas


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
    assert (simulated.own_steps, simulated.global_step) == (real.own_steps, real.global_step)


def test_no_gradient_is_kept_between_steps() -> None:
    replica = small_population(small_scenario()).replicas[0]
    replica.inner_step()
    assert replica.gradients() == {}


def test_a_clock_follows_the_partners_within_bounds() -> None:
    replica = small_population(small_scenario(steps=60)).replicas[0]
    replica.catch_up(50)
    assert replica.global_step == 0  # no step of its own yet
    for _ in range(3):
        replica.inner_step()
    replica.catch_up(50)
    assert replica.global_step == 12
    replica.catch_up(5)
    assert replica.global_step == 12


def test_diverged_training_is_reported() -> None:
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
