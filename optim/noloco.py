"""NoLoCo's outer step for a pair of peers, with one tensor per meeting.

Pure functions on flat f32 tensors of any one shape and device; they write to no input. NoLoCo (arXiv 2506.10911, Eq. 1-3, with the sign of
its released code) is rewritten so that the partner enters only through its message u (docs/concepts/mathematics.md). In the formulas:
phi = slow weights, theta = fast weights (the snapshot), g = phi - theta, delta = momentum, w = the peer's share of the pair's tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optim.compiled import CompiledLibrary


@dataclass(frozen=True, slots=True)
class NoLoCo:
    """NoLoCo's outer optimizer. Every returned tensor is new. Raises ValueError for values that cannot train."""

    alpha: float = 0.5  # momentum
    beta: float = 0.7  # step size
    gamma: float = 0.7  # pull towards the partner

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha < 1.0:
            raise ValueError(f"alpha must satisfy 0 <= alpha < 1, and is {self.alpha}.")
        if not (self.beta > 0.0 and math.isfinite(self.beta)):
            raise ValueError(f"beta must be positive and finite, and is {self.beta}.")
        limit = 2.0 * (1.0 - self.alpha**2)  # exact in mean square for random pairs (docs/concepts/mathematics.md)
        if not 0.0 < self.gamma < limit:
            raise ValueError(
                f"gamma must satisfy 0 < gamma < 2(1 - alpha^2) = {limit:.4g} at alpha {self.alpha:g}, and is {self.gamma:g}: "
                "outside, the peers' weights drift apart without bound."
            )

    def message(self, slow: Tensor, fast: Tensor, weight: float) -> Tensor:
        """Return u = gamma*phi - 2*beta*w*g, the one tensor that is sent."""
        fast_share = 2.0 * self.beta * weight
        return torch.mul(slow, self.gamma - fast_share).add_(fast, alpha=fast_share)

    def pair_step(
        self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float, gap: Tensor, failed: Tensor | None = None, part: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Take the outer step with a partner and return (new slow weights, new momentum).

        delta' = alpha*delta - 2*beta*w*g + gap/2 and phi' = phi + delta', with gap = Q(u_j) - Q(u_i). Q is what the partner decodes,
        also of this peer's own message: so the pair's mean moves exactly. `failed` (bool, one per value) marks values that did not
        decode on one of the two sides. These values take the solo step, whatever `gap` holds there. `part`: how much of the step is taken;
        the rest is the solo step.
        """
        progress = fast - slow
        pull = torch.mul(progress, 2.0 * self.beta * weight).add_(gap, alpha=0.5)
        if failed is not None or part < 1.0:
            alone = progress.mul_(self.beta)
            if part < 1.0:
                pull.sub_(alone).mul_(part).add_(alone)
            if failed is not None:
                pull = torch.where(failed, alone, pull)
        new_momentum = torch.mul(momentum, self.alpha).add_(pull)  # rounds twice on every machine, as the compiled part does
        return slow + new_momentum, new_momentum

    def compiled_pair_step(
        self,
        compiled: CompiledLibrary,
        slow: Tensor,
        momentum: Tensor | None,
        fast: Tensor,
        weight: float,
        gap: Tensor,
        failed: Tensor | None = None,
        part: float = 1.0,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Take the same step on contiguous CPU tensors in one pass; return also the shift, phi' - theta. A momentum of None is zero."""
        factors = part, 2.0 * self.beta * weight, self.beta, self.alpha
        return compiled.pair_step((slow, fast), momentum, gap, failed, factors)

    def solo_step(self, slow: Tensor, momentum: Tensor, fast: Tensor) -> tuple[Tensor, Tensor]:
        """Take the outer step without a partner: delta' = alpha*delta - beta*g and phi' = phi + delta'; return (phi', delta')."""
        new_momentum = torch.sub(fast, slow).mul_(self.beta).add_(momentum, alpha=self.alpha)
        return slow + new_momentum, new_momentum


def token_weight(own_tokens: int, partner_tokens: int) -> float:
    """Return this peer's share of the tokens that the pair trained on; 1/2 for none. Raises ValueError for a negative count."""
    if own_tokens < 0 or partner_tokens < 0:
        raise ValueError(f"Token counts cannot be negative: {own_tokens} and {partner_tokens}.")
    total = own_tokens + partner_tokens
    return own_tokens / total if total else 0.5


AVERAGE = NoLoCo(alpha=0.0, beta=1.0, gamma=1.0)
"""The rule of statistics at all times: with weight 1/2 both sides take their mean. Momentum would carry a variance below zero."""

FINISH = NoLoCo(alpha=0.0, beta=1.0, gamma=1.0)
"""The last averaging: with weight 1/2 the message is the fast weights, and both sides end on their mean."""
