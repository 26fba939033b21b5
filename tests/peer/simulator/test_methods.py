from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from optim.codecs import CODECS
from peer.simulator.methods import METHODS, method
from protocol.errors import BadSettings
from tests.peer.simulator.swarms import small_scenario, trained, weights


@pytest.mark.parametrize("name", METHODS)
def test_each_method_trains(name: str) -> None:
    population = trained(method=name, peers=3, steps=8)
    start = trained(method="local", peers=1, steps=1).replicas[0]
    assert all(bool(torch.isfinite(vector).all()) for vector in weights(population))
    assert all(not torch.equal(vector, start.weights) for vector in weights(population))
    assert (population.traffic.completed > 0) == (name != "local")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["noloco", "streaming"])
def test_each_codec_works_in_pairs_and_in_groups(name: str, codec: str) -> None:
    population = trained(method=name, peers=2, steps=5, codec=codec)
    assert population.traffic.sent_bytes > 0


def test_sizes_say_what_is_kept() -> None:
    made = small_scenario(peers=5)
    assert method("noloco").size(made).num_replicas == 5
    assert method("ddp").size(made).num_replicas == 1
    assert method("noloco").size(made).own_vectors == 2
    assert method("local").size(made).own_vectors == 0


def test_schedules_are_as_long_as_the_training() -> None:
    made = small_scenario(peers=2, speeds=(Fraction(3), Fraction(1)))
    assert method("noloco").schedules(made) == [Fraction(3, 2), Fraction(3, 2)]  # slow peers hear of the clock of fast ones
    assert method("local").schedules(made) == [Fraction(3, 2), Fraction(1, 2)]
    assert method("diloco").schedules(made) == [1, 1]
    assert method("ddp").schedules(made) == [1]


def test_a_training_has_as_many_steps_as_it_says() -> None:
    made = small_scenario(peers=2, steps=6, speeds=(Fraction(4), Fraction(1)))
    assert method("noloco").num_steps(made) == 9 + 2
    assert method("diloco").num_steps(made) == 12


def test_an_unknown_method_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadSettings) as caught:
        method("dilco")
    assert "diloco" in caught.value.hint
