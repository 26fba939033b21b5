"""The merge gate: whether a partner's message is of a size that honest training explains. Sums and comparisons only; no tensor, no I/O.

A gap (the partner's message minus one's own) grows with the steps that both have made since they last agreed, directly or through others.
A peer knows its own part of that, its `reach`: how far it has moved since, added up from its own pseudo-gradients, solo steps included; a
meeting halves it, and adds half of what the gap shows of the partner's. A clock that ran on without us counts as if we had moved. Peers who
train alike have like reaches: training explains a gap of `LIMIT` of them, unless it leads back along our own movement by more than `BACK`.

Whoever was away, alone for long, or in the other half of a split is farther off, and so is everybody for one who has just come. For these a
peer has an `allowance`: what its reach does not explain of a gap is taken from it. It grows again by a tenth of what the peer moves itself,
up to `FULL_STEPS` of its steps as long as they are now. What a partner says of itself opens nothing, but for a clock that ours follows. So
whoever always sends what is just allowed gets through once, and then with no more than our own training makes up for.

The allowance is not for what shares nothing with our weights: two unrelated vectors lie farther apart than either is long. All this stops
noise, overflow and other models' weights, but no patient liar who keeps to the usual size: that counts as the harm that a member can do.
(Honest gaps and attacks: docs/log.md, "A gate that knows who trained how much".)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

LIMIT: Final = 2.0  # reaches; honest gaps of peers in company come to half of it, seldom to all of it
BACK: Final = 1.5  # reaches; honest gaps of peers in company come to a quarter of it
FIRST_ALLOWANCE: Final = 2.0  # of the message's length: who has met nobody has little to lose
FULL_STEPS: Final = 60.0  # own steps: up to where the allowance grows again, and to where it falls
EARNED: Final = 0.1  # of one's own movement
UNRELATED: Final = 0.99  # of the longer message's length


@dataclass(frozen=True, slots=True)
class Lengths:
    """Euclidean lengths of a fragment's vectors at a meeting."""

    moved: float  # by oneself since the last outer step, and as far again for each step by which one's clock ran on alone
    step: float  # by oneself in one step
    message: float  # one's own: the weights, about
    partner: float  # the partner's message
    back: float  # of the gap, along one's own movement since the last outer step; negative where it leads on


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a fragment stands towards the others."""

    reach: float = 0.0  # how far it may be from them; what it has moved since its last outer step comes on top
    allowance: float | None = None  # what may be merged beyond that; None before the first meeting


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
            return f"the partner's message is {gap:.3g} away from ours, more than {self.limit(own):.3g} can be honest"
        fits = gap <= max(self._explained(own), UNRELATED * max(own.message, own.partner))
        return "" if fits else f"the partner's message is {gap:.3g} away from ours and has nothing in common with it"

    def accept(self, gap: float, own: Lengths) -> None:
        """Take note of a merged gap."""
        reach, allowance = self._bounds.reach + own.moved, self._allowance(own)
        unexplained = min(allowance, max(0.0, gap - self._explained(own)))
        self._bounds = Bounds(0.5 * math.hypot(reach, min(gap, reach + unexplained)), allowance - unexplained)

    def step_alone(self, moved: float) -> None:
        """Take note of an outer step without a partner."""
        self._bounds = Bounds(self._bounds.reach + moved, self._bounds.allowance)

    def state(self) -> dict[str, float | None]:
        """Return what a checkpoint must hold: JSON-able."""
        return asdict(self._bounds)

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Take over what `state` returned."""
        self._bounds = Bounds(state["reach"] or 0.0, state["allowance"])

    def _explained(self, own: Lengths) -> float:
        reach = self._bounds.reach + own.moved
        return LIMIT * reach if own.back <= BACK * reach else 0.0

    def _allowance(self, own: Lengths) -> float:
        """Return the allowance as it is now, after what was moved since the last outer step."""
        allowance, full = self._bounds.allowance, FULL_STEPS * own.step
        if allowance is None:
            return FIRST_ALLOWANCE * own.message
        if allowance <= full:
            return min(full, allowance + EARNED * own.moved)
        return full + (allowance - full) * max(0.0, 1.0 - own.moved / full) if full else allowance
