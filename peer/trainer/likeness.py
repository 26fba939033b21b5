"""Answers of several holders to the same micro-batch: which are alike, and which one is odd.

Holders of a stage train on, and average their weights from time to time, so their gradients of one micro-batch are near each other, but not
equal. The limits are measured: docs/concepts/attacks.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gossamer.peer.machine.units import percent_text

LEAST_COSINE: Final = 0.3
MOST_RATIO: Final = 5.0  # of the lengths of two gradients
MOST_OPPOSED: Final = 0.05
MOST_LOSS_GAP: Final = 1.0  # nats per token
TINY: Final = 1e-30


@dataclass(frozen=True, slots=True, eq=False)
class GradientAnswer:
    """What one holder has answered: the gradient f32[rows, L, width] and the loss in nats per token."""

    hop: int
    gradient: Tensor
    loss: float


@dataclass(frozen=True, slots=True)
class Likeness:
    """How much two answers are alike.

    Wrong labels for some tokens change the gradient at these tokens alone, so the cosine of the whole stays high. `opposed` shows them.
    """

    cosine: float
    ratio: float  # of the longer gradient to the shorter one
    loss_gap: float
    opposed: float  # share of tokens whose gradients point against each other, weighted by their lengths

    @classmethod
    def of(cls, one: GradientAnswer, other: GradientAnswer) -> Likeness:
        """Compare two answers; values of any size, and NaN, are allowed."""
        (first, first_length), (second, second_length) = _direction(one.gradient), _direction(other.gradient)
        longer, shorter = max(first_length, second_length), min(first_length, second_length)
        if longer == 0.0:  # of text without a loss
            return cls(1.0, 1.0, abs(one.loss - other.loss), 0.0)
        cosine = float((first * second).sum())
        return cls(cosine, longer / shorter if shorter else math.inf, abs(one.loss - other.loss), _opposed(first, second))

    @property
    def is_honest(self) -> bool:
        """Whether two honest holders may differ so much; False for NaN."""
        is_near = self.cosine >= LEAST_COSINE and self.ratio <= MOST_RATIO and self.loss_gap <= MOST_LOSS_GAP
        return is_near and self.opposed <= MOST_OPPOSED

    def __str__(self) -> str:
        near = f"cosine {self.cosine:.2f}, lengths 1 : {self.ratio:.3g}, losses {self.loss_gap:.2f} nats apart"
        return f"{near}, {percent_text(self.opposed)} of the tokens opposed"


@dataclass(frozen=True, slots=True)
class AnswersAlike:
    """What follows from several answers."""

    alike: tuple[GradientAnswer, ...]  # empty: nobody can tell which are right
    odd: int | None = None  # the hop of the one that is not among them
    evidence: str = ""  # where not all are alike


def compare(answers: Sequence[GradientAnswer]) -> AnswersAlike:
    """Compare two or three answers to one micro-batch."""
    pairs = {pair: Likeness.of(*pair) for pair in itertools.combinations(answers, 2)}
    alike = [pair for pair, likeness in pairs.items() if likeness.is_honest]
    if len(alike) >= len(answers) - 1:  # each is like another one, directly or by way of the third
        return AnswersAlike(tuple(answers))
    if not alike:
        return AnswersAlike((), None, str(min(pairs.values(), key=lambda likeness: likeness.cosine)))
    (pair,) = alike
    (odd,) = (answer for answer in answers if answer not in pair)
    unlike = max((likeness for (one, other), likeness in pairs.items() if odd in (one, other)), key=lambda likeness: likeness.cosine)
    return AnswersAlike(pair, odd.hop, f"{unlike}; two others have {pairs[pair]}")


def _direction(gradient: Tensor) -> tuple[Tensor, float]:
    """Return a gradient's direction, f32[rows, L, width], and its length: of any finite one without overflow."""
    largest = float(gradient.abs().amax())
    if largest == 0.0:
        return torch.zeros_like(gradient), 0.0
    scaled = gradient / largest
    length = float(scaled.norm())
    return scaled / max(length, TINY), length * largest


def _opposed(first: Tensor, second: Tensor) -> float:
    """Return the share of tokens whose gradients point against each other, weighted by their lengths."""
    weights = first.norm(dim=-1) * second.norm(dim=-1)
    return float(weights[(first * second).sum(-1) < 0].sum() / weights.sum().clamp_min(TINY))
