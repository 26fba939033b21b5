"""The other rules for pairs: SlowMo with gossip, and GASLoC."""

from __future__ import annotations

import math

import pytest
import torch

from gossamer.optim import diloco
from gossamer.optim.diloco import DiLoCoSettings
from gossamer.optim.gossip import GASLoC, SlowMo
from gossamer.optim.noloco import NoLoCo, PairRule
from tests import reference

RULE = GASLoC(alpha=0.5, beta=0.7, gamma=0.6)
SLOWMO = SlowMo(alpha=0.5, beta=0.7)


def state(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slow weights, momentum and fast weights of a pair: f32[2, 60]."""
    generator = torch.Generator().manual_seed(seed)
    slow = torch.randn(2, 60, generator=generator)
    return slow, 0.1 * torch.randn(2, 60, generator=generator), slow + 0.1 * torch.randn(2, 60, generator=generator)


def drifts(num_rounds: int) -> torch.Tensor:
    """What the inner steps add, f64[rounds, 2, 20]."""
    return torch.randn(num_rounds, 2, 20, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def meet(rule: PairRule, slow: torch.Tensor, momentum: torch.Tensor, fast: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One exact meeting of rows 0 and 1."""
    sent = [rule.message(slow[k], momentum[k], fast[k], 0.5) for k in (0, 1)]
    stepped = [rule.pair_step(slow[k], momentum[k], fast[k], 0.5, sent[1 - k] - sent[k]) for k in (0, 1)]
    return torch.stack([new for new, _ in stepped]), torch.stack([new for _, new in stepped])


def test_slowmo_ends_on_the_mean_of_where_each_would_go_alone() -> None:
    given = state()
    alone = [SLOWMO.solo_step(*(tensor[k] for tensor in given)) for k in (0, 1)]
    new_slow, new_momentum = meet(SLOWMO, *given)
    torch.testing.assert_close(new_slow, ((alone[0][0] + alone[1][0]) / 2).expand(2, -1))
    assert torch.equal(new_momentum, torch.stack([alone[0][1], alone[1][1]]))


@pytest.mark.parametrize("other", [NoLoCo(0.0, 0.7, 1.0), GASLoC(0.0, 0.7, 1.0)])
def test_without_outer_momentum_all_land_on_the_pairs_mean(other: PairRule) -> None:
    """alpha 0: momentum does not matter, and at gamma 1 the others pull as far as SlowMo."""
    given = state(1)
    torch.testing.assert_close(meet(SlowMo(0.0, 0.7), *given)[0], meet(other, *given)[0])


@pytest.mark.parametrize(("rule", "pull"), [(SLOWMO, 0.5), (RULE, 0.3)])
def test_failed_values_go_alone_and_nothing_given_is_changed(rule: PairRule, pull: float) -> None:
    given = [tensor[0] for tensor in state(2)]
    copies = [tensor.clone() for tensor in given]
    failed = torch.arange(60) < 20
    new_slow, new_momentum = rule.pair_step(*given, 0.5, torch.where(failed, torch.nan, 1.0), failed)
    alone = rule.solo_step(*given)
    assert torch.equal(new_slow[:20], alone[0][:20]) and torch.equal(new_momentum[:20], alone[1][:20])
    torch.testing.assert_close(new_slow[20:], alone[0][20:] + pull)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, copies, strict=True))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 0.99, math.nextafter(1.0, 0.0)])
def test_slowmo_allows_every_momentum_below_one(alpha: float) -> None:
    assert SlowMo(alpha, 0.4).alpha == alpha


@pytest.mark.parametrize(("alpha", "beta", "says"), [(1.0, 0.7, "alpha must"), (math.nan, 0.7, "alpha must"), (0.5, 0.0, "beta must")])
def test_what_cannot_train_is_refused_by_its_own_name(alpha: float, beta: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SlowMo(alpha, beta)
    with pytest.raises(ValueError, match=says):
        GASLoC(alpha, beta, 0.1)
    with pytest.raises(ValueError, match="gamma must"):
        GASLoC(0.5, 0.7, 1.6)


def test_gasloc_follows_the_oracle_round_after_round() -> None:
    given = drifts(6)
    slow = torch.randn(2, 20, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    momentum = torch.zeros_like(slow)
    history = [[slow[0, 3].item(), slow[1, 3].item()]]
    for number, drift in enumerate(given, 1):
        slow, momentum = meet(RULE, slow, momentum, slow + drift)
        seen = [[float(one[0, 3]), float(one[1, 3])] for one in given[:number]]
        expected = reference.gasloc(history, seen, RULE.beta, RULE.gamma, RULE.alpha)
        torch.testing.assert_close(slow[:, 3], torch.tensor(expected, dtype=torch.float64))
        history.append(expected)


def test_gaslocs_mean_takes_nesterovs_step() -> None:
    slow = torch.zeros(2, 20, dtype=torch.float64)
    momentum, mean, velocity = torch.zeros_like(slow), slow[0], slow[0]
    nesterov = DiLoCoSettings(RULE.beta, RULE.alpha)
    for drift in drifts(6):
        slow, momentum = meet(RULE, slow, momentum, slow + drift)
        mean, velocity = diloco.outer_step(mean, velocity, -drift.mean(0), nesterov)
        torch.testing.assert_close(slow.mean(0), mean)
