"""Curves of a peer's figures over time, for the charts and the estimates of the status. Computed from events.

The size is bounded: a full curve drops every second point and doubles its spacing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

MAX_POINTS = 400
FIRST_SPACING_S = 1.0
TREND_POINTS = 60  # the last ones, behind the trend of the loss
TREND_STEPS = 100  # that they must span: a trend is not carried on beyond what was trained
FEWEST_POINTS = 8  # with fewer, trend and end are unknown
PACE_S = 600.0  # of the last points that give the pace of the run


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """The figures of a peer at one time; counts as in the status."""

    ts: float  # Unix seconds
    step: int  # the schedule clock
    loss: float | None  # nats per token, mean since the point before; None where it was not finite
    tokens_per_second: float
    blocked_share: float  # of training time since the start
    meetings: int  # completed
    failed: int  # meetings
    sent: int  # bytes in meetings
    received: int


@dataclass(frozen=True, slots=True)
class History:
    """Curves of one session of a peer. Frozen: `add` returns the next one."""

    points: tuple[HistoryPoint, ...] = ()
    evals: tuple[tuple[float, int, float], ...] = ()  # Unix seconds, schedule clock, held-out loss
    spacing_s: float = FIRST_SPACING_S
    pace_s: float = 0.0  # Unix seconds: since then the peer trains without a break, and its step moves by training alone
    _sum: tuple[float, int] = field(default=(0.0, 0), repr=False)  # of the losses since the last point, and how many

    def add(self, point: HistoryPoint) -> History:
        """Add a point; within the spacing only its loss counts, into the mean."""
        total, number = self._sum
        if point.loss is not None and math.isfinite(point.loss):
            total, number = total + point.loss, number + 1
        if self.points and point.ts - self.points[-1].ts < self.spacing_s:
            return replace(self, _sum=(total, number))
        points, spacing_s = (*self.points, replace(point, loss=total / number if number else None)), self.spacing_s
        if len(points) > MAX_POINTS:
            points, spacing_s = points[len(points) % 2 :: 2], spacing_s * 2
        return replace(self, points=points, spacing_s=spacing_s, _sum=(0.0, 0))

    def add_eval(self, ts: float, step: int, loss: float) -> History:
        """Add a held-out loss if it is finite."""
        if not math.isfinite(loss):
            return self
        evals = (*self.evals, (ts, step, loss))
        return replace(self, evals=evals if len(evals) <= MAX_POINTS else evals[len(evals) % 2 :: 2])

    @property
    def loss_trend(self) -> float | None:
        """Nats per token that the training loss changes by in 100 steps of the run, over the last points; None while unknown."""
        losses = [(point.step, point.loss) for point in self.points[-TREND_POINTS:] if point.loss is not None]
        if len(losses) < FEWEST_POINTS or losses[-1][0] - losses[0][0] < TREND_STEPS:
            return None
        return 100 * statistics.linear_regression(*zip(*losses, strict=True)).slope

    def ends(self, total_steps: int) -> float | None:
        """Return when the run ends at its pace of late (Unix seconds); None while unknown."""
        since_s = max(self.pace_s, self.points[-1].ts - PACE_S) if self.points else 0.0
        late = [point for point in self.points if point.ts >= since_s]
        if len(late) < FEWEST_POINTS:
            return None
        first, last = late[0], late[-1]
        steps = last.step - first.step
        return last.ts + (total_steps - last.step) * (last.ts - first.ts) / steps if steps > 0 else None

    def moved(self, seconds: float, now_s: float) -> History:
        """Return the curves with every time that much later, none after `now_s` and none before the one ahead of it."""

        def later(times: Iterable[float]) -> Iterator[float]:
            return itertools.accumulate((min(ts + seconds, now_s) for ts in times), max)

        points = tuple(replace(point, ts=ts) for point, ts in zip(self.points, later(point.ts for point in self.points), strict=True))
        evals = tuple((ts, step, loss) for (_, step, loss), ts in zip(self.evals, later(ts for ts, *_ in self.evals), strict=True))
        return replace(self, points=points, evals=evals, pace_s=min(self.pace_s + seconds, now_s))

    def to_json(self) -> dict[str, Any]:
        """Return the curves, JSON-able: one list for each figure."""
        points = {figure.name: [getattr(point, figure.name) for point in self.points] for figure in fields(HistoryPoint)}
        evals = {name: [each[place] for each in self.evals] for place, name in enumerate(("ts", "step", "loss"))}
        return {"points": points, "evals": evals}
