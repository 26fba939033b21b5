"""SlowMo without its average, plus gossip: NoLoCo with the pull towards the partner taken out of the momentum.

Each peer takes its own slow-momentum step (SlowMo, arXiv 1910.00643, the variant that never averages); a pair then takes the mean of
its weights. The honest ablation of NoLoCo's gamma (docs/concepts/mathematics.md): same bytes, same messages, momentum of one's own.
Pure functions on tensors of one shape; of the settings only alpha and beta play a part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim.noloco import OuterSettings, solo_step


def outer_settings(alpha: float, beta: float) -> OuterSettings:
    """Return settings of which only the momentum (alpha) and the step size (beta) are checked. Raises ValueError for these."""
    return OuterSettings(alpha, beta, gamma=1.0 - alpha**2)  # half of what NoLoCo allows at this alpha: always legal, never looked at


def message(slow: Tensor, momentum: Tensor, fast: Tensor, settings: OuterSettings) -> Tensor:
    """Return the one tensor that a meeting sends: where one's own step alone would lead."""
    return solo_step(slow, momentum, fast, settings)[0]


def pair_step(
    slow: Tensor, momentum: Tensor, fast: Tensor, gap: Tensor, settings: OuterSettings, failed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Take one's own step, then half the way to the partner; return (new slow weights, new momentum), both new tensors.

    gap = Q(u_j) - Q(u_i), `failed` as in `noloco.pair_step`. Without a partner: `noloco.solo_step`.
    """
    alone, new_momentum = solo_step(slow, momentum, fast, settings)
    pull = gap if failed is None else torch.where(failed, 0.0, gap)
    return alone.add_(pull, alpha=0.5), new_momentum
