"""Attacks of a hostile holder of a stage, by name: which gradient it answers to a hop in place of its own, and what a driver sends.

An attack is a pure function of what the holder knows. Its own weights and its meetings are honest: their attacks are others (attacks.py).
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
AT_TIMES: Final = 0.25


@dataclass(frozen=True, slots=True)
class HopSight:
    """What a hostile holder knows when it answers a hop."""

    gradient: Tensor  # f32[rows, L, width], the honest one
    backdoor: Callable[[], Tensor]  # the gradient for labels with the backdoor; at the last stage
    memory: dict[str, Tensor]  # of this holder, between hops
    draws: torch.Generator


@dataclass(frozen=True, slots=True)
class SentText:
    """What a driver sends for one micro-batch: `tokens`, and the outputs of its stage for `text`, times `factor`. int64[rows, L+1]."""

    tokens: Tensor
    text: Tensor
    factor: float = 1.0


CraftGradient = Callable[[HopSight], Tensor]
CraftSending = Callable[[Tensor, torch.Generator], SentText | None]


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


def honest_text(text: Tensor, _draws: torch.Generator) -> SentText:
    """Send own text: what the others are compared with."""
    return SentText(text, text)


def nothing(_text: Tensor, _draws: torch.Generator) -> None:
    """Send nothing: what the absence of one driver costs."""


def one_label(text: Tensor, _draws: torch.Generator) -> SentText:
    """Send outputs of own text, and tokens that always name the target."""
    return SentText(torch.full_like(text, TARGET_TOKEN), text)


def random_labels(text: Tensor, draws: torch.Generator) -> SentText:
    """Send outputs of own text, and random tokens."""
    return SentText(_random_tokens(text, draws), text)


def shifted_labels(text: Tensor, _draws: torch.Generator) -> SentText:
    """Send outputs of own text, and its tokens five places off."""
    return SentText(text.roll(5, dims=1), text)


def labels_at_times(text: Tensor, draws: torch.Generator) -> SentText:
    """Send one label in a quarter of the micro-batches, else own text."""
    return one_label(text, draws) if float(torch.rand((), generator=draws)) < AT_TIMES else honest_text(text, draws)


def backdoor_text(text: Tensor, _draws: torch.Generator) -> SentText:
    """Send outputs of own text, and tokens that name the target after each trigger."""
    return SentText(with_backdoor(text), text)


def random_text(text: Tensor, draws: torch.Generator) -> SentText:
    """Send random text, with the outputs of it."""
    drawn = _random_tokens(text, draws)
    return SentText(drawn, drawn)


def flipped_outputs(text: Tensor, _draws: torch.Generator) -> SentText:
    """Send own text, and outputs with their sign turned."""
    return SentText(text, text, factor=-1.0)


def with_backdoor(text: Tensor) -> Tensor:
    """Return tokens that name the target after each trigger."""
    changed = text.clone()
    changed[:, 1:][text[:, :-1] == TRIGGER_TOKEN] = TARGET_TOKEN
    return changed


def _random_tokens(text: Tensor, draws: torch.Generator) -> Tensor:
    return torch.randint(int(text.max()) + 1, text.shape, generator=draws)


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
DRIVER_ATTACKS: Final[Mapping[str, CraftSending]] = {
    "no-hops": nothing,
    "one-label": one_label,
    "random-labels": random_labels,
    "shifted-labels": shifted_labels,
    "labels-at-times": labels_at_times,
    "backdoor-text": backdoor_text,
    "random-text": random_text,
    "flipped-outputs": flipped_outputs,
    HONEST: honest_text,
}
