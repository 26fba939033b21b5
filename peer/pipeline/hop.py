"""One hop at one holder, and its states.

    ARRIVING --> QUEUED --> READY --> AWAY --> RETURNING --> BACKWARD --> ANSWERING --> OVER
                   |          ^         |          |                          ^
                   |          +-- lost or declined above: sent again          |
                   +--------------------- at the last stage ------------------+

A hop of stage 0 begins as QUEUED and ends after BACKWARD. A hop that only measures skips BACKWARD, except at stage 0. Every state may end
early: the hop is declined, or the lower stage withdraws it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from gossamer.peer.pipeline.lane import DownLane, UpLane


class HopState(Enum):
    """Where a hop is."""

    ARRIVING = auto()  # its bytes come from the lower stage
    QUEUED = auto()  # own trainer computes the stage's output
    READY = auto()  # the output waits for a lane to the next stage with credit
    AWAY = auto()  # it is sent to the next stage
    RETURNING = auto()  # the gradient's bytes come from the next stage
    BACKWARD = auto()  # own trainer computes the gradient of the stage's input
    ANSWERING = auto()  # that gradient is sent to the lower stage
    OVER = auto()


AT_TRAINER = (HopState.QUEUED, HopState.BACKWARD)


@dataclass(frozen=True, slots=True)
class HopSource:
    """Where a hop came from: a lane from the lower stage, and the hop's number on it."""

    lane: UpLane
    number: int


@dataclass(slots=True)
class Away:
    """One try to have a hop answered by the next stage."""

    lane: DownLane
    number: int  # on that lane
    sent_s: float
    delays: int = 0  # notices that it needs as long again
    notice_s: float = math.inf  # when the lower stage is told to wait longer

    @property
    def overdue_s(self) -> float:
        """Return when the answer is overdue."""
        return self.sent_s + self.lane.patience_s * (1 + self.delays)


@dataclass(slots=True)
class Hop:
    """A micro-batch at this holder."""

    number: int  # the node's, in the names of its files
    name: bytes  # the micro-batch's, the same at every stage
    source: HopSource | None  # None: begun here
    state: HopState
    measure: bool = False
    is_known: bool = False  # a holder that was asked has added this micro-batch already, or may have
    tries: int = 0  # how often it was sent to the next stage
    tried: set[int] = field(default_factory=set)  # the lanes
    away: Away | None = None  # in the states AWAY and RETURNING
    loss: float | None = None
    unread_s: float = math.inf  # in the state ANSWERING: when the lower stage should have read the answer

    @property
    def is_fresh(self) -> bool:
        """Whether it began here and is away for the first time, so that nobody but the partner has seen its name."""
        return self.source is None and self.tries == 1
