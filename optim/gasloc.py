"""GASLoC: gossip around Nesterov's outer step (Cagnasso, Belilovsky, Oyallon, arXiv 2606.11081), for a pair.

y = phi + beta * (theta - phi);  phi' = y - gamma * (y - mean y) + alpha * (y - y_before)

y is where a plain outer step leads, and the one tensor that is sent; y_before is that of the meeting before. The pair's mean takes
Nesterov's step exactly (`optim.diloco`), each peer with a momentum of its own. The equation is the one that public summaries of the paper
state; its text and its settings we have not seen. In our letters: alpha its momentum, beta the outer learning rate, gamma the gossip step.
Pure functions on tensors of one shape. `momentum` is y_before - phi, so that zero starts it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim.noloco import OuterSettings


def message(slow: Tensor, fast: Tensor, settings: OuterSettings) -> Tensor:
    """Return the one tensor that a meeting sends: y. It is new and belongs to the caller."""
    return torch.lerp(slow, fast, settings.beta)


def pair_step(
    slow: Tensor, momentum: Tensor, fast: Tensor, gap: Tensor, settings: OuterSettings, failed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Take the outer step with a partner; return (new slow weights, new momentum), both new tensors.

    gap = Q(y_j) - Q(y_i), `failed` as in `noloco.pair_step`.
    """
    pull = gap if failed is None else torch.where(failed, 0.0, gap)
    proposal = message(slow, fast, settings)
    stepped = (proposal - slow).sub_(momentum).mul_(settings.alpha).add_(proposal).add_(pull, alpha=0.5 * settings.gamma)
    return stepped, proposal.sub_(stepped)


def solo_step(slow: Tensor, momentum: Tensor, fast: Tensor, settings: OuterSettings) -> tuple[Tensor, Tensor]:
    """Take the outer step without a partner; return (new slow weights, new momentum), both new tensors."""
    return pair_step(slow, momentum, fast, torch.zeros((), device=slow.device), settings)
