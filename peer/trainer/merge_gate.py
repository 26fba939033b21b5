"""The merge gate: whether a partner's message is of a size that honest training explains. Sums and comparisons only; no tensor, no I/O.

A gap (the partner's message minus one's own) is refused when it is not finite, or more than ten times as long as its yardstick: the
largest of the usual accepted gap, one's own pseudo-gradients lately, and one's own usual momentum. The accepted gaps alone would refuse
honest partners whenever the learning rate warms up or two peers have just met; with one's own movement beside them, no honest gap that was
measured comes near ten yardsticks. Before a peer's first outer step there is nothing to compare with but its own movement, and nothing to
lose: then half the length of the weights will do too. (The measurements: docs/log.md, "The merge gate's yardstick".)

What partners can lengthen, the gap and the momentum (which holds half of every gap that was merged), enters the yardstick as a running
mean in which one meeting counts for a fifth, and for no more than one and a half yardsticks. So whoever always sends what is just allowed
makes the limit grow by a tenth at each meeting, and honest meetings in between take it back. After a first meeting of all, the limit is no
wider than before it, unless one's own pseudo-gradients make it so. The momentum of the moment counts only for who has not met anybody: a
joiner with what it took over.

This stops scaled noise, overflow and other models' weights. It does not stop a patient liar who keeps to the usual size; for lack of
anything better that counts as the harm that a member can do. The idea, with the factor ten, is from the norm tests of robust gossip
(ClippedGossip, arXiv 2202.01545).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

LIMIT: Final = 10.0
FIRST_LIMIT: Final = 0.5  # of the slow weights' length
MEMORY: Final = 0.8  # share of the past in the running figures: about the last five meetings count
GROWTH: Final = 1.5  # yardsticks: for more than this, what a partner can lengthen does not count in the running figures


@dataclass(frozen=True, slots=True)
class Lengths:
    """Euclidean lengths of one's own vectors of a fragment at a meeting."""

    pseudo_gradient: float
    momentum: float
    slow: float


@dataclass(frozen=True, slots=True)
class Usual:
    """What a fragment's meetings looked like lately."""

    gap: float = 0.0  # running mean of accepted gaps
    pseudo_gradient: float = 0.0  # one's own: the running mean, or the last one if that was longer
    momentum: float = 0.0  # one's own: running mean


class MergeGate:
    """Judge the gaps of one fragment."""

    def __init__(self) -> None:
        self._usual = Usual()

    def limit(self, own: Lengths) -> float:
        """Return how long a gap may be."""
        is_first = own.momentum == 0.0 and self._usual.gap == 0.0
        return max(FIRST_LIMIT * own.slow if is_first else 0.0, LIMIT * self._yardstick(own))

    def judge(self, gap: float, own: Lengths) -> str:
        """Return why a gap of this length must not be merged; empty if it may. Changes nothing."""
        if not math.isfinite(gap):
            return "the partner's message is not finite"
        limit = self.limit(own)
        return "" if gap <= limit else f"the partner's message is {gap:.3g} away from ours, more than {limit:.3g} can be honest"

    def accept(self, gap: float, own: Lengths) -> None:
        """Take note of a merged gap. One long gap moves the yardstick by little, so that it cannot open the gate for longer ones."""
        usual, most = self._usual, GROWTH * self._yardstick(own)
        pseudo_gradient = max(own.pseudo_gradient, _running(usual.pseudo_gradient, own.pseudo_gradient))
        if usual.gap:
            self._usual = Usual(_running(usual.gap, min(gap, most)), pseudo_gradient, _running(usual.momentum, min(own.momentum, most)))
        else:
            self._usual = Usual(min(gap, max(most, FIRST_LIMIT * own.slow / LIMIT)), pseudo_gradient, own.momentum)

    def state(self) -> dict[str, float]:
        """Return what a checkpoint must hold: JSON-able."""
        return asdict(self._usual)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned, of an earlier version too."""
        self._usual = Usual(float(state["gap"]), float(state["pseudo_gradient"]), float(state.get("momentum", 0.0)))

    def _yardstick(self, own: Lengths) -> float:
        usual = self._usual
        return max(usual.gap, usual.pseudo_gradient, own.pseudo_gradient, usual.momentum if usual.gap else own.momentum)


def _running(past: float, now: float) -> float:
    return MEMORY * past + (1.0 - MEMORY) * now
