"""The inner optimizer: AdamW with decay groups, and a learning rate that follows the run's clock.

Warm-up then cosine over the clock that the whole run shares; who joins late ramps up again from zero over its own first steps
(re-warming, arXiv 2308.04014), so that a fresh optimizer state does not kick cloned weights. Nothing here knows of outer steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class InnerSettings:
    """The inner optimizer's constants. Raises ValueError for values that cannot train."""

    total_steps: int
    learning_rate: float = 2e-3
    final_fraction: float = 0.1
    warmup_steps: int = 50
    rewarm_steps: int = 20
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if self.total_steps < 1 or self.warmup_steps < 0 or self.rewarm_steps < 0:
            raise ValueError("total_steps must be at least 1, warmup_steps and rewarm_steps at least 0.")
        if not (self.learning_rate > 0.0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"learning_rate must be positive and finite, and is {self.learning_rate}.")
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ValueError(f"final_fraction must lie in [0, 1], and is {self.final_fraction}.")
        if not (0.0 <= self.beta1 < 1.0 and 0.0 <= self.beta2 < 1.0 and self.weight_decay >= 0.0):
            raise ValueError("beta1 and beta2 must lie in [0, 1), and weight_decay must not be negative.")


def learning_rate(clock_steps: int, steps_since_join: int, settings: InnerSettings) -> float:
    """Return the learning rate of the next inner step.

    `clock_steps` is the run's clock before the step, `steps_since_join` the peer's own steps since it took over somebody's weights
    (a founder passes its clock). Linear warm-up and linear re-warm, whichever is behind, times a cosine that ends at
    `final_fraction` of the peak when the clock reaches `total_steps`.
    """
    ramp = min(_ramp(clock_steps, settings.warmup_steps), _ramp(steps_since_join, settings.rewarm_steps))
    falling_steps = max(1, settings.total_steps - settings.warmup_steps)
    progress = min(1.0, max(0.0, (clock_steps - settings.warmup_steps) / falling_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.learning_rate * ramp * (settings.final_fraction + (1.0 - settings.final_fraction) * cosine)


def _ramp(done_steps: int, ramp_steps: int) -> float:
    return 1.0 if done_steps >= ramp_steps else (done_steps + 1) / (ramp_steps + 1)


def build_adamw(parameters: Iterable[tuple[str, Tensor]], settings: InnerSettings) -> torch.optim.AdamW:
    """Build AdamW over named parameters; weight decay only on those of two or more dimensions (not on norms and biases).

    Parameters that do not require a gradient are left out. The learning rate is the peak until `set_learning_rate`.
    """
    trained = [parameter for _, parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=settings.learning_rate, betas=betas)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = value
