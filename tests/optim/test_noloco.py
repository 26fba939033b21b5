from __future__ import annotations

import itertools
from dataclasses import astuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.optim.compiled import compiled_step_for
from gossamer.optim.noloco import FINISH, NoLoCo, token_weight
from tests import reference
from tests.optim.codings import CODINGS_OF_CPU, coded_by
from tests.reference import Replica

RULES = [NoLoCo(), NoLoCo(0.0, 1.0, 1.0), NoLoCo(0.3, 0.9, 0.4), NoLoCo(0.9, 0.7, 0.19)]


def replicas(count: int, values: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Slow weights, momentum, fast weights: f32[count, values], as far apart as real ones."""
    generator = torch.Generator().manual_seed(seed)
    slow = torch.randn(count, values, generator=generator)
    momentum = 0.1 * torch.randn(count, values, generator=generator)
    fast = slow + 0.1 * torch.randn(count, values, generator=generator)
    return slow, momentum, fast


def meet(
    slow: Tensor, momentum: Tensor, fast: Tensor, weights: tuple[float, float], rule: NoLoCo, failed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One exact meeting of rows 0 and 1."""
    u = [rule.message(slow[k], fast[k], weights[k]) for k in (0, 1)]
    steps = [rule.pair_step(slow[k], momentum[k], fast[k], weights[k], u[1 - k] - u[k], failed) for k in (0, 1)]
    return torch.stack([step[0] for step in steps]), torch.stack([step[1] for step in steps])


def oracle(slow: Tensor, momentum: Tensor, fast: Tensor, column: int) -> list[Replica]:
    return [Replica(*(float(tensor[row, column]) for tensor in (slow, momentum, fast))) for row in range(len(slow))]


def assert_matches(slow: Tensor, momentum: Tensor, expected: list[list[Replica]], tolerance: float = 3e-7) -> None:
    phi = torch.tensor([[r.phi for r in column] for column in expected], dtype=torch.float64).T
    delta = torch.tensor([[r.delta for r in column] for column in expected], dtype=torch.float64).T
    torch.testing.assert_close(slow.double(), phi, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(momentum.double(), delta, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rule", RULES)
def test_one_tensor_equals_the_papers_two(rule: NoLoCo) -> None:
    state = replicas(2, 50)
    slow, momentum = meet(*state, (0.5, 0.5), rule)
    columns = [oracle(*state, column) for column in range(50)]
    two = [reference.noloco_two_tensor(column, *astuple(rule)) for column in columns]
    one = [reference.noloco_one_tensor(column, *astuple(rule)) for column in columns]
    assert all(a.phi == pytest.approx(b.phi, abs=1e-14) for a, b in zip(itertools.chain(*one), itertools.chain(*two), strict=True))
    assert_matches(slow, momentum, two)


def test_one_tensor_equals_two_tensors_to_1e_7_in_fp32() -> None:
    slow, momentum, fast = (tensor * 0.1 for tensor in replicas(2, 20_000))
    rule = NoLoCo()
    new_slow, _ = meet(slow, momentum, fast, (0.5, 0.5), rule)
    pull = rule.beta * (fast - slow).mean(0) - rule.gamma * (slow - slow.mean(0))
    two_tensor = slow + (rule.alpha * momentum + pull)
    assert (new_slow - two_tensor).abs().max() <= 1e-7


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [(1, 1), (4, 1), (1000, 1), (0, 7), (0, 0)])
def test_token_weights_match_the_oracle(rule: NoLoCo, tokens: tuple[int, int]) -> None:
    state = replicas(2, 20, seed=1)
    weights = (token_weight(*tokens), token_weight(*tokens[::-1]))
    slow, momentum = meet(*state, weights, rule)
    expected = [reference.noloco_token_weighted(*oracle(*state, column), tokens, *astuple(rule)) for column in range(20)]
    assert_matches(slow, momentum, expected)


def test_solo_matches_the_oracle() -> None:
    state = replicas(1, 20)
    rule = NoLoCo(0.4, 0.8, 0.3)
    slow, momentum = rule.solo_step(*(tensor[0] for tensor in state))
    assert_matches(slow[None], momentum[None], [[reference.solo(*oracle(*state, c), rule.alpha, rule.beta)] for c in range(20)])


@pytest.mark.parametrize("gamma", [0.1, 0.7, 1.4])
def test_two_peers_are_heavy_ball_diloco_for_ever(gamma: float) -> None:
    rule = NoLoCo(gamma=gamma)
    slow, momentum = torch.randn(1, 300).repeat(2, 1), torch.zeros(2, 300)
    expected = [[Replica(float(x), 0.0, 0.0)] * 2 for x in slow[0]]
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        fast = slow + 0.1 * torch.randn(2, 300, generator=generator)
        moved = [[Replica(r.phi, r.delta, float(fast[k, c])) for k, r in enumerate(column)] for c, column in enumerate(expected)]
        slow, momentum = meet(slow, momentum, fast, (0.5, 0.5), rule)
        expected = [reference.diloco_heavy_ball(column, rule.beta, rule.alpha) for column in moved]
        assert_matches(slow, momentum, expected, tolerance=5e-6)
    assert (slow[0] - slow[1]).abs().max() < 1e-5


def test_gamma_equal_to_beta_needs_only_the_fast_weights() -> None:
    _, _, fast = replicas(1, 100)
    u = NoLoCo().message(torch.full_like(fast[0], 1e6), fast[0], 0.5)
    assert torch.equal(u, 0.7 * fast[0])


def test_unequal_tokens_conserve_the_token_weighted_mean() -> None:
    slow, momentum, fast = (tensor.double() for tensor in replicas(2, 500, seed=2))
    rule = NoLoCo()
    weights = (token_weight(300, 100), token_weight(100, 300))
    new_slow, new_momentum = meet(slow, momentum, fast, weights, rule)
    weighted_g = weights[0] * (slow[0] - fast[0]) + weights[1] * (slow[1] - fast[1])
    expected = rule.alpha * momentum.mean(0) - rule.beta * weighted_g
    torch.testing.assert_close(new_momentum.mean(0), expected, atol=1e-13, rtol=0)
    torch.testing.assert_close(new_slow.mean(0), slow.mean(0) + expected, atol=1e-13, rtol=0)


def test_failed_values_take_the_solo_step() -> None:
    slow, momentum, fast = replicas(2, 40, seed=3)
    rule = NoLoCo()
    failed = torch.arange(40) % 3 == 0
    weights = (0.8, 0.2)
    gap = torch.where(failed, torch.nan, rule.message(slow[1], fast[1], 0.2) - rule.message(slow[0], fast[0], 0.8))
    new_slow, new_momentum = rule.pair_step(slow[0], momentum[0], fast[0], weights[0], gap, failed)
    alone = rule.solo_step(slow[0], momentum[0], fast[0])
    together = meet(slow, momentum, fast, weights, rule)
    assert torch.equal(new_slow[failed], alone[0][failed])
    assert torch.equal(new_momentum[failed], alone[1][failed])
    assert torch.equal(new_slow[~failed], together[0][0][~failed])


def test_inputs_are_left_alone() -> None:
    state = replicas(2, 10)
    copies = [tensor.clone() for tensor in state]
    meet(*state, (0.7, 0.3), NoLoCo(), torch.ones(10, dtype=torch.bool))
    NoLoCo().solo_step(*(tensor[0] for tensor in state))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(state, copies, strict=True))


def test_finish_ends_on_the_mean_of_the_fast_weights() -> None:
    slow, momentum, fast = replicas(2, 100)
    assert torch.equal(FINISH.message(slow[0], fast[0], 0.5), fast[0])
    new_slow, _ = meet(slow, momentum, fast, (0.5, 0.5), FINISH)
    torch.testing.assert_close(new_slow, fast.mean(0).expand(2, -1))


@pytest.mark.parametrize(("alpha", "gamma"), [(0.5, 1.5), (0.5, 0.0), (0.5, -1.0), (0.9, 0.7), (0.0, 2.0), (0.5, float("nan"))])
def test_unstable_gamma_is_refused_with_the_bound(alpha: float, gamma: float) -> None:
    with pytest.raises(ValueError, match=r"gamma must satisfy 0 < gamma < 2\(1 - alpha\^2\)"):
        NoLoCo(alpha=alpha, gamma=gamma)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.7), (-0.1, 0.7), (float("nan"), 0.7), (0.5, 0.0), (0.5, float("inf"))])
def test_other_impossible_settings_are_refused(alpha: float, beta: float) -> None:
    with pytest.raises(ValueError, match="must"):
        NoLoCo(alpha=alpha, beta=beta)


def test_token_weights() -> None:
    assert token_weight(0, 0) == 0.5
    assert token_weight(3, 1) == 0.75
    assert token_weight(0, 5) == 0.0
    assert token_weight(5, 0) + token_weight(0, 5) == 1.0
    with pytest.raises(ValueError, match="negative"):
        token_weight(-1, 4)


def step_by(
    coding: str,
    rule: NoLoCo,
    state: tuple[Tensor, Tensor, Tensor],
    weight: float,
    gap: Tensor,
    failed: Tensor | None,
    part: float = 1.0,
    *,
    has_momentum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The outer step by one form of coding: slow weights, momentum, shift."""
    slow, momentum, fast = state
    with coded_by(coding):
        compiled = compiled_step_for(slow.device)
    if compiled is not None:
        new_slow, moved, shift = rule.compiled_pair_step(
            compiled, slow, momentum if has_momentum else None, fast, weight, gap, failed, part
        )
        return new_slow, new_slow - slow if moved is None else moved, shift
    zero = torch.zeros_like(momentum)
    new_slow, moved = rule.pair_step(slow, momentum if has_momentum else zero, fast, weight, gap, failed, part)
    return new_slow, moved if has_momentum else new_slow - slow, new_slow - fast


@given(
    st.sampled_from(RULES),
    st.integers(0, 3000),
    st.floats(0.0, 1.0, width=32),
    st.sampled_from([0.0, 1e-40, 1e-3, 1.0, 1e28]),
    st.sampled_from(["none", "some", "all"]),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 0.75, 1.0]),
    st.integers(0, 1000),
)
@settings(max_examples=200)
def test_every_form_of_coding_takes_the_same_step_bit_for_bit(
    rule: NoLoCo, size: int, weight: float, scale: float, fails: str, has_momentum: bool, part: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    slow, momentum, fast = (tensor[0] * scale for tensor in replicas(1, size, seed))
    gap = scale * torch.randn(size, generator=generator)
    gap[gap.abs() < 2.0**-125] = 0.0  # half of a denormal number is not exact, and some machines round it with the sum
    failed = None if fails == "none" else torch.rand(size, generator=generator) < (0.3 if fails == "some" else 2.0)
    steps = [
        step_by(coding, rule, (slow, momentum, fast), weight, gap, failed, part, has_momentum=has_momentum) for coding in CODINGS_OF_CPU
    ]
    for step in steps:
        assert all(torch.equal(one, other) for one, other in zip(step, steps[0], strict=True))


@pytest.mark.parametrize("coding", CODINGS_OF_CPU)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [(1, 1), (4, 1), (0, 7)])
def test_every_form_of_coding_takes_the_step_of_the_oracle(coding: str, rule: NoLoCo, tokens: tuple[int, int]) -> None:
    slow, momentum, fast = replicas(2, 20, seed=1)
    weights = (token_weight(*tokens), token_weight(*tokens[::-1]))
    u = [rule.message(slow[k], fast[k], weights[k]) for k in (0, 1)]
    steps = [step_by(coding, rule, (slow[k], momentum[k], fast[k]), weights[k], u[1 - k] - u[k], None, has_momentum=True) for k in (0, 1)]
    expected = [reference.noloco_token_weighted(*oracle(slow, momentum, fast, column), tokens, *astuple(rule)) for column in range(20)]
    assert_matches(torch.stack([step[0] for step in steps]), torch.stack([step[1] for step in steps]), expected)
    assert torch.equal(steps[0][2], steps[0][0] - fast[0])


@pytest.mark.parametrize("part", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("coding", CODINGS_OF_CPU)
def test_the_part_of_a_step_that_is_not_taken_is_the_solo_step(coding: str, part: float) -> None:
    rule, (slow, momentum, fast) = NoLoCo(), (tensor[0] for tensor in replicas(1, 500))
    gap = torch.randn(500)
    taken = step_by(coding, rule, (slow, momentum, fast), 0.3, gap, None, part, has_momentum=True)
    pair, solo = rule.pair_step(slow, momentum, fast, 0.3, gap), rule.solo_step(slow, momentum, fast)
    for got, with_partner, without in zip(taken, pair, solo, strict=False):
        torch.testing.assert_close(got, without.lerp(with_partner, part), atol=1e-6, rtol=1e-6)
