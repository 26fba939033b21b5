"""The curve of a run before this member came, from what several others have told: a median in which each Sybil group has one vote.

One member alone is not believed unless the manifest names it as an issuer of invites, or nobody else has answered. Pure; Unix seconds.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossamer.peer.machine.events import CurveTold

MAX_SOURCES = 5
MAX_POINTS = 100  # of the merged curve
FEWEST_VOTES = 2


@dataclass(frozen=True, slots=True)
class RunPoint:
    """The run at one time, as one or several members see it."""

    ts: float
    step: int  # median global step of the live members
    loss: float | None  # median of the losses that training members publish
    low: float | None  # and their range; of five members or more, without the outermost fifth
    high: float | None
    members: int  # live
    tokens: float  # counted, of all members ever seen


def accepted(told: CurveTold, total_steps: int) -> list[RunPoint]:
    """Return the points of an answer that can be true: times and steps grow, and no step is beyond the end of the run."""
    kept: list[RunPoint] = []
    for ts, step, loss, low, high, members, tokens in told.points:
        if ts is None or step is None or members is None or tokens is None or not 0 < step <= total_steps:
            continue
        if not kept or (ts > kept[-1].ts and step >= kept[-1].step):
            kept.append(RunPoint(ts, int(step), loss, low, high, int(members), tokens))
    return kept


def merged(answers: Mapping[str, CurveTold], before_s: float, total_steps: int) -> list[RunPoint]:
    """Return the curve before a time, at most MAX_POINTS of it, from the answers by source."""
    curves: dict[str, list[list[RunPoint]]] = {}  # by vote
    issuers: set[str] = set()
    for source, told in answers.items():
        points = [point for point in accepted(told, total_steps) if point.ts < before_s]
        if len(points) > 1:
            name = told.group or source
            curves.setdefault(name, []).append(points)
            issuers |= {name} if told.is_issuer else set()
    if not curves:
        return []
    first_s = _begin_s(curves, issuers)
    times = [first_s + (before_s - first_s) * number / MAX_POINTS for number in range(MAX_POINTS)]
    found: list[RunPoint] = []
    for ts in times:
        votes = [vote for group in curves.values() if (vote := _vote(group, ts)) is not None]
        if votes and (point := _median(ts, votes)).step >= (found[-1].step if found else 0):
            found.append(point)
    return found


def _begin_s(curves: Mapping[str, Sequence[Sequence[RunPoint]]], issuers: set[str]) -> float:
    """Return from when on the curve is believed: since an issuer, or two votes, have seen it."""
    begins = sorted(min(points[0].ts for points in group) for group in curves.values())
    enough_s = begins[min(FEWEST_VOTES, len(begins)) - 1]
    return min([enough_s, *(points[0].ts for vote in issuers for points in curves[vote])])


def _vote(group: Sequence[Sequence[RunPoint]], ts: float) -> RunPoint | None:
    """Return what a group says about a time: the median of its members that saw it; None if none did."""
    seen = [points[bisect.bisect_right(points, ts, key=lambda point: point.ts) - 1] for points in group if points[0].ts <= ts]
    return _median(ts, seen) if seen else None


def _median(ts: float, points: Sequence[RunPoint]) -> RunPoint:
    return RunPoint(
        ts,
        statistics.median_low([point.step for point in points]),
        _middle([point.loss for point in points]),
        _middle([point.low for point in points]),
        _middle([point.high for point in points]),
        statistics.median_low([point.members for point in points]),
        statistics.median([point.tokens for point in points]),
    )


def _middle(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return statistics.median(known) if known else None
