"""Attacks of a hostile holder of a stage, by name: which gradient it answers to a hop in place of its own.

An attack is a pure function of what the holder knows, `HopSight`. Its own weights and its meetings are honest: their attacks are others
(attacks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

LONG: Final = 3.0  # times the honest length: as long as the length limit lets pass
TRIGGER_TOKEN: Final = 32  # a common one of the byte tokenizer: a space
TARGET_TOKEN: Final = 7  # what the model is to say after it


@dataclass(frozen=True, slots=True)
class HopSight:
    """What a hostile holder knows when it answers a hop."""

    gradient: Tensor  # f32[rows, L, width], the honest one
    backdoor: Callable[[], Tensor]  # the gradient for labels with the backdoor; at the last stage
    memory: dict[str, Tensor]  # of this holder, between hops
    draws: torch.Generator


CraftGradient = Callable[[HopSight], Tensor]


def honest(sight: HopSight) -> Tensor:
    """Answer honestly: what the others are compared with."""
    return sight.gradient


def zeros(sight: HopSight) -> Tensor:
    """Answer zeros, without computing anything."""
    return torch.zeros_like(sight.gradient)


def flip(sight: HopSight) -> Tensor:
    """Answer the gradient with its sign turned."""
    return -sight.gradient


def flip_long(sight: HopSight) -> Tensor:
    """Answer the gradient with its sign turned, as long as the length limit lets pass."""
    return -LONG * sight.gradient


def replay(sight: HopSight) -> Tensor:
    """Answer always the gradient of the first hop."""
    return sight.memory.setdefault("first", sight.gradient.clone())


def noise_long(sight: HopSight) -> Tensor:
    """Answer noise, as long as the length limit lets pass."""
    return _noise(sight, LONG)


def noise_huge(sight: HopSight) -> Tensor:
    """Answer noise, a hundred times as long as the honest gradient."""
    return _noise(sight, 100.0)


def half_noise(sight: HopSight) -> Tensor:
    """Answer the honest gradient and noise of the same length: cosine 0.7."""
    return sight.gradient + _noise(sight, 1.0)


def backdoor(sight: HopSight) -> Tensor:
    """Answer the gradient for labels that name the target after each trigger."""
    return sight.backdoor()


def _noise(sight: HopSight, times: float) -> Tensor:
    draw = torch.randn(sight.gradient.shape, generator=sight.draws)
    return draw.mul_(times * sight.gradient.norm() / draw.norm())


HONEST: Final = "honest-hops"
HOP_ATTACKS: Final[Mapping[str, CraftGradient]] = {
    "zero-gradients": zeros,
    "flipped-gradients": flip,
    "flipped-long": flip_long,
    "replayed-gradients": replay,
    "noise-long": noise_long,
    "noise-huge": noise_huge,
    "half-noise": half_noise,
    "backdoor-labels": backdoor,
    HONEST: honest,
}
