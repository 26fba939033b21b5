"""The figures that a member publishes about its own part in the run. They are claims: they are shown, and no peer acts on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossamer.protocol import limits
from gossamer.protocol.limits import Bounded


@dataclass(frozen=True, slots=True)
class MemberFigures(Bounded):
    """One member's own part in a run, inside its record, whose signature covers it."""

    own_steps: int  # inner steps since it joined
    loss_milli: int  # its last training loss in thousandths, plus one; 0: none
    joined_s: int  # Unix seconds
    carried_mb: int  # megabytes in its meetings since it joined, both directions

    @property
    def loss(self) -> float | None:
        """The last training loss; None if the member publishes none."""
        return (self.loss_milli - 1) / 1000 if self.loss_milli else None


def loss_milli(loss: float | None) -> int:
    """Return a loss as `MemberFigures` holds it; 0 for one that is not finite, negative or too large to publish."""
    if loss is None or not math.isfinite(loss) or not 0 <= loss <= limits.LOSS:
        return 0
    return round(1000 * loss) + 1
