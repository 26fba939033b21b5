"""The outer step of a pair, by one tensor per meeting: what every rule offers, and NoLoCo's.

Pure functions on flat f32 tensors of any one shape and device, value by value; nothing is kept, no input is written to. NoLoCo
(arXiv 2506.10911, Eq. 1-3, with the sign of its code) is rewritten so that the partner enters only through its message u. The token
weights, the solo step and the real stability bound are ours (docs/concepts/mathematics.md). In the formulas phi = slow weights,
theta = fast weights (the snapshot), g = phi - theta, delta = momentum, w = weight.
Not here: how a message is coded (optim/codecs), who the partner is; other rules for pairs are in optim/gossip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class PairRule(Protocol):
    """What a peer of a pair sends, and the outer steps that it takes; all tensors returned are new.

    `weight` is one's own share of the pair's tokens.
    """

    def message(self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float) -> Tensor:
        """Return the one tensor that is sent."""

    def pair_step(
        self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float, gap: Tensor, failed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take the outer step with a partner and return (new slow weights, new momentum).

        gap = Q(u_j) - Q(u_i): what the partner decodes of one's own message counts, not the message, so that the pair's mean moves
        exactly. `failed` (bool, one per value) marks what did not decode on either side: those values take the solo step, whatever
        `gap` holds there.
        """

    def solo_step(self, slow: Tensor, momentum: Tensor, fast: Tensor) -> tuple[Tensor, Tensor]:
        """Take the outer step without a partner and return (new slow weights, new momentum)."""


@dataclass(frozen=True, slots=True)
class NoLoCo:
    """NoLoCo with its momentum (alpha), step size (beta) and pull towards the partner (gamma). A PairRule.

    With `average_momentum` (unpublished) partners average their momentum too, which allows more of it. Raises ValueError
    outside the range where disagreement between peers stays bounded.
    """

    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 0.7
    average_momentum: bool = False

    def __post_init__(self) -> None:
        require_step(self.alpha, self.beta)
        formula, limit = self._gamma_limit()
        if not 0.0 < self.gamma < limit:
            raise ValueError(
                f"gamma must satisfy 0 < gamma < {formula} = {limit:.4g} at alpha {self.alpha:g}, and is {self.gamma:g}: "
                "outside, the peers' weights drift apart without bound."
            )

    def _gamma_limit(self) -> tuple[str, float]:
        """Return the exact mean-square bound for random pairs (docs/concepts/mathematics.md; averaged momentum likewise)."""
        if self.average_momentum:
            return "2(2 - alpha^2)/(2 + alpha)", 2.0 * (2.0 - self.alpha**2) / (2.0 + self.alpha)
        return "2(1 - alpha^2)", 2.0 * (1.0 - self.alpha**2)

    def message(self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float) -> Tensor:
        """Return u = gamma*phi - 2*beta*w*g, plus alpha*delta if momentum is averaged."""
        fast_share = 2.0 * self.beta * weight
        sent = torch.mul(slow, self.gamma - fast_share).add_(fast, alpha=fast_share)
        return sent.add_(momentum, alpha=self.alpha) if self.average_momentum else sent

    def pair_step(
        self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float, gap: Tensor, failed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take delta' = alpha*delta - 2*beta*w*g + gap/2 and phi' = phi + delta'; see PairRule."""
        progress = fast - slow
        pull = torch.mul(progress, 2.0 * self.beta * weight).add_(gap, alpha=0.5)
        if failed is not None:
            pull = torch.where(failed, progress.mul_(self.beta), pull)
        new_momentum = pull.add_(momentum, alpha=self.alpha)
        return slow + new_momentum, new_momentum

    def solo_step(self, slow: Tensor, momentum: Tensor, fast: Tensor) -> tuple[Tensor, Tensor]:
        """Take `own_step`, which is NoLoCo's with n = 1."""
        return own_step(slow, momentum, fast, self.alpha, self.beta)


def require_step(alpha: float, beta: float) -> None:
    """Raise ValueError unless momentum (alpha) and step size (beta) can train."""
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"alpha must satisfy 0 <= alpha < 1, and is {alpha}.")
    if not (beta > 0.0 and math.isfinite(beta)):
        raise ValueError(f"beta must be positive and finite, and is {beta}.")


def own_step(slow: Tensor, momentum: Tensor, fast: Tensor, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    """Take a heavy-ball step by oneself: delta' = alpha*delta - beta*g and phi' = phi + delta'; return phi' and delta'."""
    new_momentum = torch.sub(fast, slow).mul_(beta).add_(momentum, alpha=alpha)
    return slow + new_momentum, new_momentum


def token_weight(own_tokens: int, partner_tokens: int) -> float:
    """Return the share of the pair's tokens that stands behind one's own pseudo-gradient; 1/2 when neither trained.

    The two sides' weights sum to 1. Raises ValueError for a negative count.
    """
    if own_tokens < 0 or partner_tokens < 0:
        raise ValueError(f"Token counts cannot be negative: {own_tokens} and {partner_tokens}.")
    total = own_tokens + partner_tokens
    return own_tokens / total if total else 0.5


FINISH = NoLoCo(alpha=0.0, beta=1.0, gamma=1.0)
"""The last averaging: with weight 1/2 the message is the fast weights, and both sides end on their mean."""
