from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from peer.simulator import population as module
from peer.simulator.population import Size, free_bytes, need_memory
from protocol.errors import BadManifest, BadSettings
from tests.peer.simulator.swarms import small_population, small_scenario
from tests.peer.small import LLAMA

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


def test_a_model_that_does_not_fit_at_all_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
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
