from __future__ import annotations

import pytest
import torch

from gossamer.peer.trainer.magnitudes import LEARNED, MOST_ACTIVATION, REMEMBERED, TIMES_USUAL, Magnitudes


def of_size(size: float) -> torch.Tensor:
    """One token of this size among smaller ones."""
    values = torch.zeros(2, 4, 8)
    values[1, 2] = size
    return values


def test_the_usual_size_bounds_what_passes_once_there_are_enough_micro_batches() -> None:
    magnitudes = Magnitudes(MOST_ACTIVATION)
    for number in range(LEARNED):
        assert magnitudes.limit == MOST_ACTIVATION
        magnitudes.check(of_size(1.0 + number % 3))
    assert magnitudes.limit == 2.0 * TIMES_USUAL
    magnitudes.check(of_size(1.9 * TIMES_USUAL))
    with pytest.raises(ValueError, match="the size of the values is"):
        magnitudes.check(of_size(2.1 * TIMES_USUAL))


@pytest.mark.parametrize("size", [1.1e6, 1e20, 7e28, torch.inf, torch.nan])
def test_no_history_lets_a_huge_size_pass(size: float) -> None:
    magnitudes = Magnitudes(MOST_ACTIVATION)
    for _ in range(2 * REMEMBERED):
        with pytest.raises(ValueError, match="the size of the values is"):
            magnitudes.check(of_size(size))


@pytest.mark.parametrize("usual", [0.0, 1e-6])
def test_honest_sizes_that_have_grown_pass_again(usual: float) -> None:
    magnitudes = Magnitudes(MOST_ACTIVATION)
    for _ in range(REMEMBERED):
        magnitudes.check(of_size(usual))
    refused = 0
    for _ in range(REMEMBERED):
        try:
            magnitudes.check(of_size(1.0))
        except ValueError:
            refused += 1
    assert refused <= REMEMBERED // 2 + 1
    magnitudes.check(of_size(1.0))


def test_the_gradient_of_a_mean_over_few_tokens_may_be_larger() -> None:
    magnitudes = Magnitudes(MOST_ACTIVATION)
    for _ in range(LEARNED):
        magnitudes.check(of_size(1.0))
    magnitudes.check(of_size(10 * TIMES_USUAL), 0.05)
