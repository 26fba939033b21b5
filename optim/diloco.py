"""DiLoCo and Streaming DiLoCo: a whole group averages its pseudo-gradients, and every peer takes the same outer step.

DiLoCo (arXiv 2311.08105) comes in its Nesterov form and in the heavy-ball form that the NoLoCo paper compares with. Options: the outer
learning rate by group size, and CO2's clip and staleness penalty (arXiv 2401.16265). Streaming DiLoCo (arXiv 2501.18512, Algorithm 2) takes
the step fragment by fragment. A pseudo-gradient is slow - fast. Pure functions on f32 tensors of one shape; results are new tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DiLoCoSettings:
    """The outer optimizer: SGD with momentum. Raises ValueError for values that cannot train."""

    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    clip: float = math.inf  # bound of each momentum value, in root mean squares of the mean pseudo-gradient
    staleness_penalty: float = 1.0  # divides a pseudo-gradient that arrived late

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0.0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"The outer learning rate must be positive and finite, and is {self.learning_rate}.")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"The outer momentum must satisfy 0 <= momentum < 1, and is {self.momentum}.")
        if not (self.clip > 0.0 and self.staleness_penalty >= 1.0):
            raise ValueError("clip must be positive and staleness_penalty at least 1.")


def learning_rate_for(group_size: int) -> float:
    """Return the best outer learning rate for a group of this size (arXiv 2503.09799, Nesterov 0.9): 0.4, 0.6 or 0.8."""
    if group_size < 1:
        raise ValueError(f"A group has at least one peer, not {group_size}.")
    return 0.4 if group_size == 1 else 0.6 if group_size < 8 else 0.8


def mean_gradient(decoded: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of the decoded pseudo-gradients, accumulated in f32 in the given order.

    To end with the same bits, every peer must pass the same decoded tensors, its own included, in the same order. Raises ValueError for
    weights that do not fit.
    """
    total = sum(weights)
    if not decoded or len(decoded) != len(weights) or min(weights) < 0 or not total > 0:
        raise ValueError("A mean needs one non-negative weight per pseudo-gradient, and not all zero.")
    mean = torch.zeros_like(decoded[0])
    for gradient, weight in zip(decoded, weights, strict=True):
        mean.add_(gradient, alpha=weight / total)
    return mean


def outer_step(slow: Tensor, momentum: Tensor, gradient: Tensor, settings: DiLoCoSettings) -> tuple[Tensor, Tensor]:
    """Take the group's outer step and return (new slow weights, new momentum), both new tensors.

    v' = mu*v + Delta; phi' = phi - eta*(Delta + mu*v') for Nesterov, phi - eta*v' for heavy-ball, as torch.optim.SGD does.
    slow = phi, momentum = v, gradient = Delta (mean of slow - fast).
    """
    weighed = gradient / settings.staleness_penalty
    new_momentum = torch.mul(momentum, settings.momentum).add_(weighed)
    if math.isfinite(settings.clip):
        bound = settings.clip * float(weighed.square().mean().sqrt())
        new_momentum.clamp_(-bound, bound)
    descent = weighed.add_(new_momentum, alpha=settings.momentum) if settings.nesterov else new_momentum
    return torch.sub(slow, descent, alpha=settings.learning_rate), new_momentum


def mix(new_slow: Tensor, fast_now: Tensor, keep: float) -> Tensor:
    """Return the new fast weights: `keep` parts of the local ones, the rest of the new slow ones. Raises ValueError outside [0, 1]."""
    if not 0.0 <= keep <= 1.0:
        raise ValueError(f"The share of the local weights to keep must lie in [0, 1], and is {keep}.")
    return torch.lerp(new_slow, fast_now, keep)


@dataclass(frozen=True, slots=True)
class StreamingSchedule:
    """When each fragment is sent and when its mean is applied; the same for all peers of a group.

    Fragment p of P has the offset round(p * H / P). It is sent every H inner steps, and first after at least H. What was sent at step t is
    applied at t + overlap. With one fragment and no overlap this is DiLoCo. Raises ValueError where a fragment would be sent again before
    it has arrived.
    """

    num_fragments: int
    inner_steps: int
    overlap_steps: int = 1

    def __post_init__(self) -> None:
        if self.num_fragments < 1 or self.inner_steps < 1:
            raise ValueError(f"A schedule needs at least one fragment and one inner step, not {self.num_fragments} and {self.inner_steps}.")
        if not 0 <= self.overlap_steps < self.inner_steps:
            raise ValueError(f"overlap_steps must satisfy 0 <= overlap_steps < inner_steps, and is {self.overlap_steps}.")

    def sending(self, step: int) -> list[int]:
        """Return the fragments to send after inner step `step` (the first is 1)."""
        if step < self.inner_steps:
            return []
        offsets = enumerate(round(fragment * self.inner_steps / self.num_fragments) for fragment in range(self.num_fragments))
        return [fragment for fragment, offset in offsets if (step - offset) % self.inner_steps == 0]

    def arriving(self, step: int) -> list[int]:
        """Return the fragments to apply after inner step `step`: those sent `overlap_steps` earlier."""
        return self.sending(step - self.overlap_steps)
