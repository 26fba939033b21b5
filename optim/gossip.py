"""Other rules for pairs, to compare NoLoCo with; the simulator's only. Same messages, same bytes; token weights play no part.

Formulas as in optim/noloco; pure functions on tensors of one shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optim.noloco import NoLoCo, own_step, require_step


@dataclass(frozen=True, slots=True)
class SlowMo:
    """SlowMo without its average, plus gossip: NoLoCo with the pull towards the partner taken out of the momentum. A PairRule.

    Each peer takes its own slow-momentum step (SlowMo, arXiv 1910.00643, the variant that never averages); a pair then takes the mean
    of its weights. The honest ablation of NoLoCo's gamma (docs/concepts/mathematics.md). Raises ValueError for values that cannot train.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        require_step(self.alpha, self.beta)

    def message(self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float) -> Tensor:
        """Return where one's own step alone would lead."""
        return self.solo_step(slow, momentum, fast)[0]

    def pair_step(
        self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float, gap: Tensor, failed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take one's own step, then half the way to the partner."""
        alone, new_momentum = self.solo_step(slow, momentum, fast)
        return alone.add_(_without(gap, failed), alpha=0.5), new_momentum

    def solo_step(self, slow: Tensor, momentum: Tensor, fast: Tensor) -> tuple[Tensor, Tensor]:
        """Take one's own step."""
        return own_step(slow, momentum, fast, self.alpha, self.beta)


@dataclass(frozen=True, slots=True)
class GASLoC:
    """GASLoC: gossip around Nesterov's outer step (Cagnasso, Belilovsky, Oyallon, arXiv 2606.11081). A PairRule.

    y = phi + beta * (theta - phi);  phi' = y - gamma * (y - mean y) + alpha * (y - y_before)

    y is where a plain outer step leads, and the one tensor that is sent; y_before is that of the meeting before. The pair's mean takes
    Nesterov's step exactly (optim/diloco), each peer with a momentum of its own, which is kept as y_before - phi, so that zero starts
    it. The equation is the one that public summaries of the paper state; its text and its settings we have not seen. In our letters:
    alpha its momentum, beta the outer learning rate, gamma the gossip step, all within NoLoCo's bounds.
    """

    alpha: float
    beta: float
    gamma: float

    def __post_init__(self) -> None:
        NoLoCo(self.alpha, self.beta, self.gamma)

    def message(self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float) -> Tensor:
        """Return y."""
        return torch.lerp(slow, fast, self.beta)

    def pair_step(
        self, slow: Tensor, momentum: Tensor, fast: Tensor, weight: float, gap: Tensor, failed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take the step above."""
        proposal = self.message(slow, momentum, fast, weight)
        stepped = (proposal - slow).sub_(momentum).mul_(self.alpha).add_(proposal).add_(_without(gap, failed), alpha=0.5 * self.gamma)
        return stepped, proposal.sub_(stepped)

    def solo_step(self, slow: Tensor, momentum: Tensor, fast: Tensor) -> tuple[Tensor, Tensor]:
        """Take Nesterov's step: that of a pair without a gap."""
        return self.pair_step(slow, momentum, fast, 1.0, torch.zeros((), device=slow.device))


def _without(gap: Tensor, failed: Tensor | None) -> Tensor:
    return gap if failed is None else torch.where(failed, 0.0, gap)
