"""Answers to the same micro-batch: which are alike, and which one is odd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gossamer.peer.trainer.likeness import MOST_LOSS_GAP, MOST_RATIO, GradientAnswer, Likeness, compare
from gossamer.peer.trainer.magnitudes import LENGTHS_LEARNED, TIMES_LENGTH, GradientLengths

DRAWS = torch.Generator().manual_seed(1)
GRADIENT = torch.randn(2, 8, 16, generator=DRAWS)


def near(noise: float = 0.2) -> Tensor:
    return GRADIENT + noise * torch.randn(GRADIENT.shape, generator=DRAWS)


def answer(hop: int, gradient: Tensor, loss: float = 2.0) -> GradientAnswer:
    return GradientAnswer(hop, gradient, loss)


def with_wrong_labels() -> Tensor:
    """Return a near gradient, at one of the sixteen tokens turned round and three times as long."""
    gradient = near()
    gradient[0, 3] *= -3
    return gradient


UNLIKE = {
    "sign": (-GRADIENT, 2.0),
    "zeros": (torch.zeros_like(GRADIENT), 2.0),
    "noise": (torch.randn(GRADIENT.shape, generator=DRAWS), 2.0),
    "length": (2 * MOST_RATIO * GRADIENT, 2.0),
    "wrong labels": (with_wrong_labels(), 2.0),
    "loss": (GRADIENT, 2.0 + 2 * MOST_LOSS_GAP),
    "not finite": (torch.full_like(GRADIENT, math.nan), 2.0),
    "huge": (1e30 * torch.randn(GRADIENT.shape, generator=DRAWS), 2.0),
}


@pytest.mark.parametrize("how", UNLIKE)
def test_an_odd_answer_is_found_among_three_and_not_used(how: str) -> None:
    gradient, loss = UNLIKE[how]
    honest = [answer(1, near()), answer(3, near())]
    found = compare([honest[0], answer(2, gradient, loss), honest[1]])
    assert found.odd == 2 and list(found.alike) == honest
    assert "two others have cosine" in found.evidence


@pytest.mark.parametrize("how", UNLIKE)
def test_of_two_unlike_answers_nobody_can_tell(how: str) -> None:
    found = compare([answer(1, near()), answer(2, *UNLIKE[how])])
    assert not found.alike and not found.odd and found.evidence


def test_like_answers_are_all_used() -> None:
    answers = [answer(number, near()) for number in range(1, 4)]
    assert compare(answers).alike == tuple(answers) and not compare(answers).odd
    assert compare(answers[:2]).alike == tuple(answers[:2])


def test_three_unlike_answers_name_nobody() -> None:
    found = compare([answer(number, torch.randn(GRADIENT.shape, generator=DRAWS)) for number in range(1, 4)])
    assert not found.alike and not found.odd


def test_text_without_a_loss_has_no_gradient_and_that_is_alike() -> None:
    assert Likeness.of(answer(1, torch.zeros(1, 2, 4)), answer(2, torch.zeros(1, 2, 4))).is_honest


def test_gradients_of_any_size_are_compared() -> None:
    found = Likeness.of(answer(1, 1e30 * GRADIENT), answer(2, 1.5e30 * GRADIENT))
    assert found.cosine == pytest.approx(1.0, abs=1e-5) and found.ratio == pytest.approx(1.5, rel=1e-4)


def test_a_gradient_that_is_much_longer_than_usual_is_shortened() -> None:
    lengths = GradientLengths()
    for _ in range(LENGTHS_LEARNED):
        assert lengths.shorten(100 * GRADIENT) is not GRADIENT
    usual = 100 * GRADIENT
    same = 2.9 * usual
    assert lengths.shorten(same) is same
    torch.testing.assert_close(lengths.shorten(50 * usual), TIMES_LENGTH * usual)


def test_the_usual_length_is_that_of_most_gradients() -> None:
    """A quarter of the answers, each as long as it likes, moves it little."""
    lengths = GradientLengths()
    for number in range(400):
        lengths.shorten(1000.0 * GRADIENT if number % 4 == 0 else GRADIENT)
    torch.testing.assert_close(lengths.shorten(1000.0 * GRADIENT), TIMES_LENGTH * GRADIENT)


def test_the_mean_over_few_tokens_may_be_longer() -> None:
    lengths = GradientLengths()
    for _ in range(LENGTHS_LEARNED):
        lengths.shorten(GRADIENT)
    few = 4.0 * GRADIENT
    assert lengths.shorten(few, share=0.25) is few
    assert lengths.shorten(few) is not few
