"""NoLoCo's outer step for a pair, in the form that needs one tensor per meeting.

Pure functions on flat f32 tensors of any one shape and device; nothing is kept, no input is written to. Papers: NoLoCo
(arXiv 2506.10911, Eq. 1-3, with the sign of its code), rewritten so that the partner enters only through its message u. The token
weights, the solo step and the real stability bound are ours (docs/concepts/mathematics.md).
Not here: how a message is coded (optim/codecs), how fast weights move meanwhile (optim/merge), who the partner is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """The outer step's momentum (alpha), step size (beta) and pull towards the partner (gamma).

    With `average_momentum` (unpublished) partners average their momentum too, which allows more of it. Raises ValueError
    outside the range where disagreement between peers stays bounded.
    """

    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 0.7
    average_momentum: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha < 1.0:
            raise ValueError(f"alpha must satisfy 0 <= alpha < 1, and is {self.alpha}.")
        if not (self.beta > 0.0 and math.isfinite(self.beta)):
            raise ValueError(f"beta must be positive and finite, and is {self.beta}.")
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


FINISH = OuterSettings(alpha=0.0, beta=1.0, gamma=1.0)
"""The last averaging: with weight 1/2 the message is the fast weights, and both sides end on their mean."""


def token_weight(own_tokens: int, partner_tokens: int) -> float:
    """Return the share of the pair's tokens that stands behind one's own pseudo-gradient; 1/2 when neither trained.

    The two sides' weights sum to 1. Raises ValueError for a negative count.
    """
    if own_tokens < 0 or partner_tokens < 0:
        raise ValueError(f"Token counts cannot be negative: {own_tokens} and {partner_tokens}.")
    total = own_tokens + partner_tokens
    return own_tokens / total if total else 0.5


def message(slow: Tensor, fast: Tensor, weight: float, settings: OuterSettings, momentum: Tensor | None = None) -> Tensor:
    """Return the one tensor that a meeting sends: u = gamma*phi - 2*beta*w*(phi - theta), plus alpha*delta if momentum is averaged.

    slow = phi, fast = theta (the snapshot), weight = w, momentum = delta (needed only where the settings average it; else not looked at).
    The result is new and belongs to the caller. Raises ValueError when the momentum is missing.
    """
    fast_share = 2.0 * settings.beta * weight
    sent = torch.mul(slow, settings.gamma - fast_share).add_(fast, alpha=fast_share)
    if not settings.average_momentum:
        return sent
    if momentum is None:
        raise ValueError("A message that averages momentum needs the momentum.")
    return sent.add_(momentum, alpha=settings.alpha)


def pair_step(
    slow: Tensor, momentum: Tensor, fast: Tensor, weight: float, gap: Tensor, settings: OuterSettings, failed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Take the outer step with a partner and return (new slow weights, new momentum), both new tensors.

    delta' = alpha*delta - 2*beta*w*g + gap/2 and phi' = phi + delta', with g = phi - theta and gap = Q(u_j) - Q(u_i): what the partner
    decodes of one's own message counts, not the message, so that the pair's mean moves exactly. `failed` (bool, one per value) marks
    what did not decode on either side: those values take the solo step, whatever `gap` holds there.
    """
    progress = fast - slow
    pull = torch.mul(progress, 2.0 * settings.beta * weight).add_(gap, alpha=0.5)
    if failed is not None:
        pull = torch.where(failed, progress.mul_(settings.beta), pull)
    new_momentum = pull.add_(momentum, alpha=settings.alpha)
    return slow + new_momentum, new_momentum


def solo_step(slow: Tensor, momentum: Tensor, fast: Tensor, settings: OuterSettings) -> tuple[Tensor, Tensor]:
    """Take the outer step without a partner (n = 1) and return (new slow weights, new momentum), both new tensors.

    delta' = alpha*delta - beta*g and phi' = phi + delta', with g = phi - theta.
    """
    new_momentum = torch.sub(fast, slow).mul_(settings.beta).add_(momentum, alpha=settings.alpha)
    return slow + new_momentum, new_momentum
