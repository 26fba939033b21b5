from __future__ import annotations

import itertools
from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from optim.noloco import FINISH, OuterSettings, message, pair_step, solo_step, token_weight
from tests import reference
from tests.reference import Replica

SETTINGS = [OuterSettings(), OuterSettings(0.0, 1.0, 1.0), OuterSettings(0.3, 0.9, 0.4), OuterSettings(0.9, 0.7, 0.19)]


def replicas(count: int, values: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Slow weights, momentum, fast weights: f32[count, values], as far apart as real ones."""
    generator = torch.Generator().manual_seed(seed)
    slow = torch.randn(count, values, generator=generator)
    momentum = 0.1 * torch.randn(count, values, generator=generator)
    fast = slow + 0.1 * torch.randn(count, values, generator=generator)
    return slow, momentum, fast


def meet(
    slow: Tensor, momentum: Tensor, fast: Tensor, weights: tuple[float, float], settings: OuterSettings, failed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One exact meeting of rows 0 and 1."""
    u = [message(slow[k], fast[k], weights[k], settings) for k in (0, 1)]
    steps = [pair_step(slow[k], momentum[k], fast[k], weights[k], u[1 - k] - u[k], settings, failed) for k in (0, 1)]
    return torch.stack([step[0] for step in steps]), torch.stack([step[1] for step in steps])


def oracle(slow: Tensor, momentum: Tensor, fast: Tensor, column: int) -> list[Replica]:
    return [Replica(*(float(tensor[row, column]) for tensor in (slow, momentum, fast))) for row in range(len(slow))]


def assert_matches(slow: Tensor, momentum: Tensor, expected: list[list[Replica]], tolerance: float = 3e-7) -> None:
    phi = torch.tensor([[r.phi for r in column] for column in expected], dtype=torch.float64).T
    delta = torch.tensor([[r.delta for r in column] for column in expected], dtype=torch.float64).T
    torch.testing.assert_close(slow.double(), phi, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(momentum.double(), delta, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("settings", SETTINGS)
def test_one_tensor_equals_the_papers_two(settings: OuterSettings) -> None:
    state = replicas(2, 50)
    slow, momentum = meet(*state, (0.5, 0.5), settings)
    columns = [oracle(*state, column) for column in range(50)]
    two = [reference.noloco_two_tensor(column, *astuple(settings)[:3]) for column in columns]
    one = [reference.noloco_one_tensor(column, *astuple(settings)[:3]) for column in columns]
    assert all(a.phi == pytest.approx(b.phi, abs=1e-14) for a, b in zip(itertools.chain(*one), itertools.chain(*two), strict=True))
    assert_matches(slow, momentum, two)


def test_one_tensor_equals_two_tensors_to_1e_7_in_fp32() -> None:
    slow, momentum, fast = (tensor * 0.1 for tensor in replicas(2, 20_000))
    settings = OuterSettings()
    new_slow, _ = meet(slow, momentum, fast, (0.5, 0.5), settings)
    pull = settings.beta * (fast - slow).mean(0) - settings.gamma * (slow - slow.mean(0))
    two_tensor = slow + (settings.alpha * momentum + pull)
    assert (new_slow - two_tensor).abs().max() <= 1e-7


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("tokens", [(1, 1), (4, 1), (1000, 1), (0, 7), (0, 0)])
def test_token_weights_match_the_oracle(settings: OuterSettings, tokens: tuple[int, int]) -> None:
    state = replicas(2, 20, seed=1)
    weights = (token_weight(*tokens), token_weight(*tokens[::-1]))
    slow, momentum = meet(*state, weights, settings)
    expected = [reference.noloco_token_weighted(*oracle(*state, column), tokens, *astuple(settings)[:3]) for column in range(20)]
    assert_matches(slow, momentum, expected)


def test_solo_matches_the_oracle() -> None:
    state = replicas(1, 20)
    settings = OuterSettings(0.4, 0.8, 0.3)
    slow, momentum = solo_step(*(tensor[0] for tensor in state), settings)
    assert_matches(slow[None], momentum[None], [[reference.solo(*oracle(*state, c), settings.alpha, settings.beta)] for c in range(20)])


@pytest.mark.parametrize("gamma", [0.1, 0.7, 1.4])
def test_two_peers_are_heavy_ball_diloco_for_ever(gamma: float) -> None:
    settings = OuterSettings(gamma=gamma)
    slow, momentum = torch.randn(1, 300).repeat(2, 1), torch.zeros(2, 300)
    expected = [[Replica(float(x), 0.0, 0.0)] * 2 for x in slow[0]]
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        fast = slow + 0.1 * torch.randn(2, 300, generator=generator)
        moved = [[Replica(r.phi, r.delta, float(fast[k, c])) for k, r in enumerate(column)] for c, column in enumerate(expected)]
        slow, momentum = meet(slow, momentum, fast, (0.5, 0.5), settings)
        expected = [reference.diloco_heavy_ball(column, settings.beta, settings.alpha) for column in moved]
        assert_matches(slow, momentum, expected, tolerance=5e-6)
    assert (slow[0] - slow[1]).abs().max() < 1e-5


def test_gamma_equal_to_beta_needs_only_the_fast_weights() -> None:
    _, _, fast = replicas(1, 100)
    u = message(torch.full_like(fast[0], 1e6), fast[0], 0.5, OuterSettings())
    assert torch.equal(u, 0.7 * fast[0])


def test_unequal_tokens_conserve_the_token_weighted_mean() -> None:
    slow, momentum, fast = (tensor.double() for tensor in replicas(2, 500, seed=2))
    settings = OuterSettings()
    weights = (token_weight(300, 100), token_weight(100, 300))
    new_slow, new_momentum = meet(slow, momentum, fast, weights, settings)
    weighted_g = weights[0] * (slow[0] - fast[0]) + weights[1] * (slow[1] - fast[1])
    expected = settings.alpha * momentum.mean(0) - settings.beta * weighted_g
    torch.testing.assert_close(new_momentum.mean(0), expected, atol=1e-13, rtol=0)
    torch.testing.assert_close(new_slow.mean(0), slow.mean(0) + expected, atol=1e-13, rtol=0)


def test_failed_values_take_the_solo_step() -> None:
    slow, momentum, fast = replicas(2, 40, seed=3)
    settings = OuterSettings()
    failed = torch.arange(40) % 3 == 0
    weights = (0.8, 0.2)
    gap = torch.where(failed, torch.nan, message(slow[1], fast[1], 0.2, settings) - message(slow[0], fast[0], 0.8, settings))
    new_slow, new_momentum = pair_step(slow[0], momentum[0], fast[0], weights[0], gap, settings, failed)
    alone = solo_step(slow[0], momentum[0], fast[0], settings)
    together = meet(slow, momentum, fast, weights, settings)
    assert torch.equal(new_slow[failed], alone[0][failed])
    assert torch.equal(new_momentum[failed], alone[1][failed])
    assert torch.equal(new_slow[~failed], together[0][0][~failed])


def test_inputs_are_left_alone() -> None:
    state = replicas(2, 10)
    copies = [tensor.clone() for tensor in state]
    meet(*state, (0.7, 0.3), OuterSettings(), torch.ones(10, dtype=torch.bool))
    solo_step(*(tensor[0] for tensor in state), OuterSettings())
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(state, copies, strict=True))


def test_finish_ends_on_the_mean_of_the_fast_weights() -> None:
    slow, momentum, fast = replicas(2, 100)
    assert torch.equal(message(slow[0], fast[0], 0.5, FINISH), fast[0])
    new_slow, _ = meet(slow, momentum, fast, (0.5, 0.5), FINISH)
    torch.testing.assert_close(new_slow, fast.mean(0).expand(2, -1))


@pytest.mark.parametrize(("alpha", "gamma"), [(0.5, 1.5), (0.5, 0.0), (0.5, -1.0), (0.9, 0.7), (0.0, 2.0), (0.5, float("nan"))])
def test_unstable_gamma_is_refused_with_the_bound(alpha: float, gamma: float) -> None:
    with pytest.raises(ValueError, match=r"gamma must satisfy 0 < gamma < 2\(1 - alpha\^2\)"):
        OuterSettings(alpha=alpha, gamma=gamma)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.7), (-0.1, 0.7), (float("nan"), 0.7), (0.5, 0.0), (0.5, float("inf"))])
def test_other_impossible_settings_are_refused(alpha: float, beta: float) -> None:
    with pytest.raises(ValueError, match="must"):
        OuterSettings(alpha=alpha, beta=beta)


def test_token_weights() -> None:
    assert token_weight(0, 0) == 0.5
    assert token_weight(3, 1) == 0.75
    assert token_weight(0, 5) == 0.0
    assert token_weight(5, 0) + token_weight(0, 5) == 1.0
    with pytest.raises(ValueError, match="negative"):
        token_weight(-1, 4)


def test_averaged_momentum_matches_the_oracle() -> None:
    slow, momentum, fast = replicas(2, 30, seed=4)
    settings = OuterSettings(0.9, 0.7, 0.35, average_momentum=True)
    u = [message(slow[k], fast[k], 0.5, settings, momentum[k]) for k in (0, 1)]
    steps = [pair_step(slow[k], momentum[k], fast[k], 0.5, u[1 - k] - u[k], settings) for k in (0, 1)]
    new_slow, new_momentum = (torch.stack(parts) for parts in zip(*steps, strict=True))
    expected = [reference.noloco_momentum_averaged(*oracle(slow, momentum, fast, column), 0.9, 0.7, 0.35) for column in range(30)]
    assert_matches(new_slow, new_momentum, expected)


def test_averaged_momentum_has_a_bound_of_its_own() -> None:
    OuterSettings(0.9, 0.7, 0.8, average_momentum=True)
    with pytest.raises(ValueError, match=r"2\(2 - alpha\^2\)/\(2 \+ alpha\) = 0\.8207"):
        OuterSettings(0.9, 0.7, 0.83, average_momentum=True)


def test_averaged_momentum_needs_the_momentum() -> None:
    with pytest.raises(ValueError, match="needs the momentum"):
        message(torch.zeros(3), torch.zeros(3), 0.5, OuterSettings(average_momentum=True))
