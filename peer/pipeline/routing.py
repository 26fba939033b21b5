"""Which lane a hop takes, and how many hops a holder accepts.

Of two random lanes with credit the hop rather takes the one that is expected to answer first. Capacity is measured, never declared: a
lane's usual answer includes the partner's own queue.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Collection
from dataclasses import dataclass

from gossamer.peer.pipeline.lane import FIRST_WINDOW, DownLane

LEAST_S = 1e-3  # shorter answers are all alike
IDLE_QUEUE, LONG_QUEUE = 0, 2  # hops that wait here: none, the trainer starves; more than the second, the next stage is full


def choose(lanes: Collection[DownLane], tried: Collection[int], rng: random.Random, now_s: float) -> DownLane | None:
    """Choose a lane for a hop, if possible one that it has not tried; None if no lane has credit.

    Twice the expected time makes a lane a quarter as likely: a lane is never left out for good because of an old measurement.
    """
    ready = [lane for lane in lanes if lane.credit(now_s)]
    if not ready:
        return None
    fresh = [lane for lane in ready if lane.number not in tried] or ready
    pair = rng.sample(fresh, min(2, len(fresh)))
    return rng.choices(pair, [_expected_s(lane) ** -2 for lane in pair])[0]


def _expected_s(lane: DownLane) -> float:
    usual_s = lane.usual_s if lane.answers else lane.typical_s or 1.0
    return (len(lane.unanswered) + 1) * max(LEAST_S, usual_s)


def compare(lanes: Collection[DownLane]) -> None:
    """Tell each lane the typical answer of all that have answered."""
    known = [lane.usual_s for lane in lanes if lane.answers]
    typical_s = statistics.median(known) if known else 0.0
    for lane in lanes:
        lane.typical_s = typical_s


@dataclass(slots=True)
class Capacity:
    """How many hops a holder accepts at once from all lower holders: more while its trainer starves, fewer while hops pile up."""

    most: int  # two batches: the answer of a later one would be too old
    total: int = FIRST_WINDOW

    def note_answer(self, num_waiting: int) -> None:
        """Learn from the hops that wait at the moment of an answer."""
        if num_waiting == IDLE_QUEUE:
            self.total = min(self.most, self.total + 1)
        elif num_waiting > LONG_QUEUE:
            self.total = max(FIRST_WINDOW, self.total - 1)

    def share(self, num_lanes: int) -> int:
        """Return the window of one of so many lanes: at least one hop."""
        return max(1, self.total // max(1, num_lanes))
