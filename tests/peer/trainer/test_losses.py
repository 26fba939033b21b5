"""Which held-out losses let other weights replace our own: for losses of any sign and size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.peer.trainer.losses import Losses, measured_with, try_change
from gossamer.peer.trainer.weights import Weights

TOLERANCE = 0.01
values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8).map(tuple)


@given(values)
def test_equal_weights_are_accepted(own: tuple[float, ...]) -> None:
    assert Losses(own).may_replace(Losses(own), TOLERANCE)


@given(values, st.floats(0.0, 1e6))
def test_better_weights_are_accepted(own: tuple[float, ...], better: float) -> None:
    assert Losses(tuple(value - better for value in own)).may_replace(Losses(own), TOLERANCE)


@given(st.floats(-1e6, 1e6), st.floats(0.001, 1e3))
def test_one_worse_loss_is_refused_beyond_the_tolerance(own: float, worse: float) -> None:
    theirs = own + 1.001 * TOLERANCE * abs(own) + worse
    assert not Losses((theirs,)).may_replace(Losses((own,)), TOLERANCE)


@given(values, st.sampled_from([math.nan, math.inf, -math.inf]))
def test_losses_that_are_not_finite_are_refused(own: tuple[float, ...], bad: float) -> None:
    assert not Losses((*own[1:], bad)).may_replace(Losses(own), TOLERANCE)


def test_own_losses_that_are_not_finite_accept_all_that_is_finite() -> None:
    assert Losses((5.0, 5.0)).may_replace(Losses((1.0, math.nan)), TOLERANCE)


@pytest.mark.parametrize(("size", "accepted"), [(0.1, True), (1.0, False)])
def test_a_noisy_difference_is_allowed_two_standard_errors(size: float, accepted: bool) -> None:
    own = tuple(0.1 * math.sin(7.0 * part) for part in range(100))  # with a mean close to zero
    theirs = tuple(value + size * (0.1 + math.cos(11.0 * part)) / 10.0 for part, value in enumerate(own))
    assert Losses(theirs).may_replace(Losses(own), TOLERANCE) == accepted


def test_one_part_that_is_wrecked_is_not_taken_for_noise() -> None:
    """The mean rises by as much as the standard error of the differences, however much that is."""
    own = tuple(2.0 + 0.1 * math.sin(7.0 * part) for part in range(100))
    assert not Losses((1e4, *own[1:])).may_replace(Losses(own), TOLERANCE)


@pytest.mark.parametrize(("own", "theirs"), [((0.1, 10.0), (0.1, 29.0)), ((0.05, 0.1, 0.2, 8.0), (0.05, 0.1, 0.2, 16.0))])
def test_few_unlike_parts_allow_no_noise(own: tuple[float, ...], theirs: tuple[float, ...]) -> None:
    assert not Losses(theirs).may_replace(Losses(own), TOLERANCE)


def test_losses_too_large_for_a_mean_are_refused() -> None:
    assert not Losses((1e308,) * 3).may_replace(Losses((1.0,) * 3), TOLERANCE)


def test_weights_on_trial_are_put_back() -> None:
    weight = torch.ones(3)

    weights = Weights({"weight": weight})

    def double() -> None:
        weight.mul_(2.0)

    def measure() -> Losses:
        return Losses((float(weight.sum()),))

    def fail() -> Losses:
        raise ZeroDivisionError

    assert measured_with(double, weights, measure) == Losses((6.0,)) and weight.tolist() == [1.0] * 3
    assert "6.0000" in try_change(double, weights, measure(), measure, TOLERANCE) and weight.tolist() == [1.0] * 3
    with pytest.raises(ZeroDivisionError):
        try_change(double, weights, measure(), fail, TOLERANCE)
    assert weight.tolist() == [1.0] * 3
    assert try_change(double, weights, Losses((7.0,)), measure, TOLERANCE) == "" and weight.tolist() == [2.0] * 3
