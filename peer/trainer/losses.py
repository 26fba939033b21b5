"""Held-out losses of two sets of weights, compared: may the one replace the other?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from gossamer.peer.trainer.weights import Weights
from gossamer.protocol.errors import OperatorError

MEASURE_TOPIC: Final = "evaluation"  # of warnings
EVAL_INTERVAL_STEPS: Final = 100  # inner steps between two measurements of the held-out loss
NUM_EVAL_BATCHES: Final = 8  # in a report: enough to follow a run; reported figures rest on evaluation.NUM_TOKENS...
MOST_EVAL_TOKENS: Final = 32_768  # ...of at most so many tokens together: eight large batches take as long as three steps
LEAST_PARTS: Final = 8  # whose spread says something
MOST_NOISE: Final = 0.05  # of the size of our own losses
STANDARD_ERRORS: Final = 2.0  # by which the losses of equal weights may seem to differ


class MeasureFailed(OperatorError):
    """The program's own measure of its weights failed, so nothing is adopted."""


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of the same weights on parts of held-out data: at least one number, of any sign, smaller is better."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over all parts; infinite where it is too large for a float."""
        try:
            return math.fsum(self.values) / len(self.values)
        except OverflowError:
            return math.inf

    @property
    def are_finite(self) -> bool:
        """Whether every value is finite."""
        return all(map(math.isfinite, self.values))

    def may_replace(self, own: Losses, tolerance: float) -> bool:
        """Return whether other weights, with these losses, may replace weights with the losses `own`.

        Their mean may exceed ours by `tolerance` times its size, and by two standard errors of the difference between the parts. That error
        is in the hand of whoever made the other weights, so the spread and the size of our own losses bound it. Own losses that are not
        finite allow all.
        """
        if not self.are_finite:
            return False
        excess, allowed = self.mean - own.mean, tolerance * abs(own.mean) + self._noise(own)
        return not excess > allowed

    def _noise(self, own: Losses) -> float:
        num_parts = len(own.values)
        if num_parts < LEAST_PARTS or len(self.values) != num_parts or not own.are_finite:
            return 0.0
        differences = [theirs - ours for theirs, ours in zip(self.values, own.values, strict=True)]
        error = min(statistics.stdev(differences), statistics.stdev(own.values)) / math.sqrt(num_parts)
        return min(STANDARD_ERRORS * error, MOST_NOISE * statistics.fmean(map(abs, own.values)))


def try_change(change: Callable[[], None], weights: Weights, own: Losses, measure: Callable[[], Losses], tolerance: float) -> str:
    """Change the model; return why its losses are too bad, with the model as it was, or nothing. `own`: the losses before."""
    with weights.remembered() as put_back:
        try:
            change()
            theirs = measure()
        except BaseException:  # a program's own measure may raise
            put_back()
            raise
        if theirs.may_replace(own, tolerance):
            return ""
        put_back()
    return f"its held-out loss is {theirs.mean:.4f}, that of our own weights {own.mean:.4f}"


def measured_with(
    change: Callable[[], None], weights: Weights, measure: Callable[[], Losses], names: Collection[str] | None = None
) -> Losses:
    """Return the losses that the model has after a change, of these tensors alone if they are named, with the model as it was."""
    with weights.remembered(names) as put_back:
        try:
            change()
            return measure()
        finally:
            put_back()
