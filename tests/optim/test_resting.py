"""A state that rests on the host steps as one beside the parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gossamer.optim import resting
from gossamer.optim.inner import InnerSettings, num_state_values
from gossamer.optim.resting import DeviceOptimizer, HostOptimizer, most_values_at_once

SETTINGS = InnerSettings(total_steps=100)
SHAPES = {
    "embed.weight": (50, 8),
    "layers.0.up.weight": (16, 8),
    "layers.0.down.weight": (8, 16),
    "layers.0.norm.weight": (8,),
    "layers.1.up.weight": (16, 8),
    "layers.1.q.weight": (8, 8),
    "norm.weight": (8,),
    "head.weight": (50, 8),
}


@pytest.fixture(params=[10**9, 200, 60], ids=["whole", "rows", "few rows"])
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(resting, "PART_VALUES", request.param)
    return int(request.param)


def parameters() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=draws).requires_grad_() for name, shape in SHAPES.items()}


def gradients() -> Iterator[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(4)
    while True:
        yield {name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()}


def stepped(optimizer: DeviceOptimizer | HostOptimizer, weights: dict[str, Tensor], some: Iterator[dict[str, Tensor]], count: int) -> None:
    for number in range(count):
        for name, gradient in next(some).items():
            weights[name].grad = gradient
        optimizer.step(1e-2 / (1 + number))
        optimizer.clear_gradients()
        assert all(weight.grad is None for weight in weights.values())


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_it_steps_as_beside_the_parameters_and_either_restores_the_state_of_the_other(name: str, small_parts: int) -> None:
    near, far = parameters(), parameters()
    beside, hosted = DeviceOptimizer(name, near, SETTINGS), HostOptimizer(name, far, SETTINGS)
    stepped(beside, near, gradients(), 5)
    stepped(hosted, far, gradients(), 5)
    assert_same(near, far)
    assert_same(beside.state(), hosted.state())
    again, back = HostOptimizer(name, near, SETTINGS), DeviceOptimizer(name, far, SETTINGS)
    again.restore(beside.state())
    back.restore(hosted.state())
    stepped(again, near, gradients(), 3)
    stepped(back, far, gradients(), 3)
    assert_same(near, far)
    assert_same(again.state(), back.state())
    again.forget()
    assert not again.state()


def test_parts_are_as_small_as_they_may_be(small_parts: int) -> None:
    assert most_values_at_once("adamw", SHAPES, torch.device("cpu")) <= small_parts
    assert most_values_at_once("muon", {name: SHAPES[name] for name in ("norm.weight",)}, torch.device("cpu")) == 8


def test_a_state_has_as_many_values_as_counted() -> None:
    weights = parameters()
    hosted = HostOptimizer("muon", weights, SETTINGS)
    stepped(hosted, weights, gradients(), 1)
    kept = sum(value.numel() for name, value in hosted.state().items() if not name.startswith("step/"))
    assert kept == num_state_values("muon", SHAPES)


def test_memory_of_a_parameter_may_change_between_steps() -> None:
    """A rank lays its parameters out anew after the optimizer was made."""
    near, far = parameters(), parameters()
    hosted = HostOptimizer("adamw", far, SETTINGS)
    for weight in far.values():
        weight.data = weight.data.clone()
    stepped(DeviceOptimizer("adamw", near, SETTINGS), near, gradients(), 2)
    stepped(hosted, far, gradients(), 2)
    assert_same(near, far)
