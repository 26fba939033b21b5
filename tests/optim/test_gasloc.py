from __future__ import annotations

import torch

from optim import diloco, gasloc, slowmo
from optim.diloco import DiLoCoSettings
from optim.noloco import OuterSettings
from tests import reference

SETTINGS = OuterSettings(alpha=0.5, beta=0.7, gamma=0.6)


def drifts(num_rounds: int) -> torch.Tensor:
    """What the inner steps add, f64[rounds, 2, 20]."""
    return torch.randn(num_rounds, 2, 20, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def meet(slow: torch.Tensor, momentum: torch.Tensor, drift: torch.Tensor, settings: OuterSettings) -> tuple[torch.Tensor, torch.Tensor]:
    sent = [gasloc.message(slow[k], slow[k] + drift[k], settings) for k in (0, 1)]
    stepped = [gasloc.pair_step(slow[k], momentum[k], slow[k] + drift[k], sent[1 - k] - sent[k], settings) for k in (0, 1)]
    return torch.stack([new for new, _ in stepped]), torch.stack([new for _, new in stepped])


def test_a_pair_follows_the_oracle_round_after_round() -> None:
    given = drifts(6)
    slow = torch.randn(2, 20, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    momentum = torch.zeros_like(slow)
    history = [[slow[0, 3].item(), slow[1, 3].item()]]
    for number, drift in enumerate(given, 1):
        slow, momentum = meet(slow, momentum, drift, SETTINGS)
        seen = [[float(one[0, 3]), float(one[1, 3])] for one in given[:number]]
        expected = reference.gasloc(history, seen, SETTINGS.beta, SETTINGS.gamma, SETTINGS.alpha)
        torch.testing.assert_close(slow[:, 3], torch.tensor(expected, dtype=torch.float64))
        history.append(expected)


def test_the_pairs_mean_takes_nesterovs_step() -> None:
    slow = torch.zeros(2, 20, dtype=torch.float64)
    momentum, mean, velocity = torch.zeros_like(slow), slow[0], slow[0]
    nesterov = DiLoCoSettings(SETTINGS.beta, SETTINGS.alpha)
    for drift in drifts(6):
        slow, momentum = meet(slow, momentum, drift, SETTINGS)
        mean, velocity = diloco.outer_step(mean, velocity, -drift.mean(0), nesterov)
        torch.testing.assert_close(slow.mean(0), mean)


def test_without_momentum_a_full_gossip_step_is_the_pairs_mean() -> None:
    settings = OuterSettings(alpha=0.0, beta=0.7, gamma=1.0)
    slow, drift = drifts(2)
    here, _ = meet(slow, torch.randn(2, 20, dtype=torch.float64), drift, settings)
    u = [slowmo.message(slow[k], torch.zeros(20, dtype=torch.float64), slow[k] + drift[k], settings) for k in (0, 1)]
    for k in (0, 1):
        there, _ = slowmo.pair_step(slow[k], torch.zeros(20, dtype=torch.float64), slow[k] + drift[k], u[1 - k] - u[k], settings)
        torch.testing.assert_close(here[k], there)
    assert torch.equal(here[0], here[1]) or torch.allclose(here[0], here[1])


def test_failed_values_go_alone_and_nothing_given_is_changed() -> None:
    slow, momentum, fast = torch.ones(8), torch.full((8,), 0.1), torch.full((8,), 1.5)
    failed = torch.arange(8) < 3
    gap = torch.where(failed, torch.nan, 1.0)
    new_slow, new_momentum = gasloc.pair_step(slow, momentum, fast, gap, SETTINGS, failed)
    alone = gasloc.solo_step(slow, momentum, fast, SETTINGS)
    assert torch.equal(new_slow[:3], alone[0][:3]) and torch.equal(new_momentum[:3], alone[1][:3])
    torch.testing.assert_close(new_slow[3:], alone[0][3:] + 0.3)
    torch.testing.assert_close(new_slow + new_momentum, torch.full((8,), 1.35))  # y, for the next step
    assert torch.equal(slow, torch.ones(8)) and torch.equal(momentum, torch.full((8,), 0.1)) and torch.equal(fast, torch.full((8,), 1.5))
