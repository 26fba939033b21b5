"""The merge gate: judges whether a partner's message is of a size that honest training explains. Scalars only; no tensor, no I/O.

A gap, the partner's message minus our own, grows with the steps that both peers have made since they last agreed, directly or through other
peers. A peer knows its own part of that, its `reach`: the added lengths of its own pseudo-gradients since then. A meeting halves the reach
and adds half of what the gap shows of the partner's. Training explains a gap of `LIMIT` reaches, unless the gap leads back along our own
movement by more than `BACK`.

A peer that was away or alone for long is farther off; to a new peer everybody is. The part of a gap that the reach does not explain is
taken from an `allowance`, which grows again by a tenth of the peer's own movement. So a partner that always sends as much as is allowed
gets through once. The allowance does not cover a message that shares nothing with our weights. The gate stops noise, overflow and the
weights of other models, not a patient malicious peer that keeps to the usual size. (Honest gaps and attacks: docs/log.md, "A gate that
knows who trained how much".)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

LIMIT: Final = 2.0  # reaches; honest gaps of peers that meet regularly come to half of it, seldom to all of it
BACK: Final = 1.5  # reaches; honest gaps of peers that meet regularly come to a quarter of it
FIRST_ALLOWANCE: Final = 2.0  # of the message's length: a peer that has met nobody has little to lose
FULL_STEPS: Final = 60.0  # own steps: the level to which the allowance grows again, or falls
EARNED: Final = 0.1  # of our own movement
UNRELATED: Final = 0.99  # of the longer message's length


@dataclass(frozen=True, slots=True)
class Lengths:
    """Euclidean lengths of a fragment's vectors at a meeting."""

    moved: float  # our own movement since the last outer step, extrapolated over the clock steps that were not trained here
    step: float  # our own movement in one step
    message: float  # our message: about the weights
    partner: float  # the partner's message
    back: float  # the gap's part against our own movement since the last outer step; negative where it leads on


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a fragment may be from those of other peers."""

    reach: float = 0.0  # explained by training; the movement since the last outer step comes on top
    allowance: float | None = None  # to be merged beyond that; None before the first meeting


class MergeGate:
    """Judge the gaps of one fragment."""

    def __init__(self) -> None:
        self._bounds = Bounds()

    def limit(self, own: Lengths) -> float:
        """Return how long a gap may be."""
        return self._explained(own) + self._allowance(own)

    def judge(self, gap: float, own: Lengths) -> str:
        """Return why a gap of this length must not be merged; empty if it may. Changes nothing."""
        if not math.isfinite(gap):
            return "the partner's message is not finite"
        if gap > self.limit(own):
            return f"the partner's message is {gap:.3g} away from ours, more than the {self.limit(own):.3g} that honest training explains"
        fits = gap <= max(self._explained(own), UNRELATED * max(own.message, own.partner))
        return "" if fits else f"the partner's message is {gap:.3g} away from ours and has nothing in common with it"

    def accept(self, gap: float, own: Lengths) -> None:
        """Update the bounds after a merge."""
        reach, allowance = self._bounds.reach + own.moved, self._allowance(own)
        unexplained = min(allowance, max(0.0, gap - self._explained(own)))
        self._bounds = Bounds(0.5 * math.hypot(reach, min(gap, reach + unexplained)), allowance - unexplained)

    def step_alone(self, moved: float) -> None:
        """Update the bounds after an outer step without a partner."""
        self._bounds = Bounds(self._bounds.reach + moved, self._bounds.allowance)

    def state(self) -> dict[str, float | None]:
        """Return the state for a checkpoint, JSON-able."""
        return asdict(self._bounds)

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Restore what `state` returned."""
        self._bounds = Bounds(state["reach"] or 0.0, state["allowance"])

    def _explained(self, own: Lengths) -> float:
        reach = self._bounds.reach + own.moved
        return LIMIT * reach if own.back <= BACK * reach else 0.0

    def _allowance(self, own: Lengths) -> float:
        """Return the present allowance, refilled by the movement since the last outer step."""
        allowance, full = self._bounds.allowance, FULL_STEPS * own.step
        if allowance is None:
            return FIRST_ALLOWANCE * own.message
        if allowance <= full:
            return min(full, allowance + EARNED * own.moved)
        return full + (allowance - full) * max(0.0, 1.0 - own.moved / full) if full else allowance
