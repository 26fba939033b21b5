from __future__ import annotations

import math

import pytest
import torch

from optim import noloco, slowmo
from optim.noloco import OuterSettings


def state(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slow = torch.randn(2, 60, generator=generator)
    return slow, 0.1 * torch.randn(2, 60, generator=generator), slow + 0.1 * torch.randn(2, 60, generator=generator)


def test_a_pair_ends_on_the_mean_of_where_each_would_go_alone() -> None:
    slow, momentum, fast = state()
    settings = OuterSettings()
    alone = [noloco.solo_step(slow[k], momentum[k], fast[k], settings) for k in (0, 1)]
    u = [slowmo.message(slow[k], momentum[k], fast[k], settings) for k in (0, 1)]
    for k in (0, 1):
        new_slow, new_momentum = slowmo.pair_step(slow[k], momentum[k], fast[k], u[1 - k] - u[k], settings)
        torch.testing.assert_close(new_slow, (alone[0][0] + alone[1][0]) / 2)
        assert torch.equal(new_momentum, alone[k][1])


def test_without_outer_momentum_it_is_noloco_that_lands_on_the_pair_mean() -> None:
    """alpha 0: momentum does not matter, and NoLoCo at gamma 1 pulls as far."""
    slow, momentum, fast = state(1)
    settings = OuterSettings(alpha=0.0, beta=0.7, gamma=1.0)
    u = [slowmo.message(slow[k], momentum[k], fast[k], settings) for k in (0, 1)]
    v = [noloco.message(slow[k], fast[k], 0.5, settings) for k in (0, 1)]
    for k in (0, 1):
        here, _ = slowmo.pair_step(slow[k], momentum[k], fast[k], u[1 - k] - u[k], settings)
        there, _ = noloco.pair_step(slow[k], momentum[k], fast[k], 0.5, v[1 - k] - v[k], settings)
        torch.testing.assert_close(here, there)


def test_failed_values_go_alone() -> None:
    slow, momentum, fast = state(2)
    settings = OuterSettings()
    failed = torch.arange(60) < 20
    gap = torch.where(failed, torch.nan, 1.0)
    new_slow, _ = slowmo.pair_step(slow[0], momentum[0], fast[0], gap, settings, failed)
    alone, _ = noloco.solo_step(slow[0], momentum[0], fast[0], settings)
    assert torch.equal(new_slow[:20], alone[:20])
    torch.testing.assert_close(new_slow[20:], alone[20:] + 0.5)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 0.99, math.nextafter(1.0, 0.0)])
def test_every_momentum_below_one_is_allowed(alpha: float) -> None:
    settings = slowmo.outer_settings(alpha, 0.4)
    assert (settings.alpha, settings.beta) == (alpha, 0.4)


@pytest.mark.parametrize(("alpha", "beta", "says"), [(1.0, 0.7, "alpha must"), (math.nan, 0.7, "alpha must"), (0.5, 0.0, "beta must")])
def test_what_cannot_train_is_refused_by_its_own_name(alpha: float, beta: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        slowmo.outer_settings(alpha, beta)
