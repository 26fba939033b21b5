"""When the optimizers of a program announce that the weights move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from gossamer.module_program import fenced


class Restless(SGD):
    """An optimizer of a user's that moves the weights before it calls the closure."""

    def step(self, closure: Callable[[], float]) -> float:
        self.param_groups[0]["params"][0].data.add_(1.0)
        return closure()


def of(kind: type[Optimizer]) -> tuple[Optimizer, Tensor]:
    weights = torch.ones(3, requires_grad=True)
    return kind([weights], lr=0.1), weights


def events_of(optimizer: Optimizer, weights: Tensor, by_name: bool = False) -> list[str]:
    """Return what happens in a step with a closure, and whether the weights were still at rest."""
    events: list[str] = []
    at_rest = weights.detach().clone()

    def note(what: str) -> None:
        events.append(what if torch.equal(weights, at_rest) else f"{what}, moved")

    def closure() -> float:
        note("closure")
        optimizer.zero_grad()
        weights.square().sum().backward()
        return 7.0

    with fenced([optimizer], lambda: note("announced")):
        assert optimizer.step(closure=closure) == 7.0 if by_name else optimizer.step(closure) == 7.0
    note("end")
    optimizer.step(closure)  # outside, nobody is told
    return events[:-1]


@pytest.mark.parametrize("kind", [AdamW, SGD])
@pytest.mark.parametrize("by_name", [False, True])
def test_the_weights_rest_through_the_closure(kind: type[Optimizer], by_name: bool) -> None:
    assert events_of(*of(kind), by_name) == ["closure", "announced", "end, moved"]


def test_an_optimizer_that_calls_the_closure_again_has_announced_by_then() -> None:
    events = events_of(*of(torch.optim.LBFGS))
    assert events[:2] == ["closure", "announced"]


def test_an_optimizer_of_the_users_announces_before_all_it_does() -> None:
    assert events_of(*of(Restless)) == ["announced", "closure, moved", "end, moved"]


def test_a_step_without_a_closure_is_announced_before_it() -> None:
    optimizer, weights = of(SGD)
    weights.square().sum().backward()
    seen: list[float] = []
    with fenced([optimizer], lambda: seen.append(weights[0].item())):
        optimizer.step()
    assert seen == [1.0] and weights[0] != 1.0
