"""One hop at one holder, and its states.

    ARRIVING --> QUEUED --> READY --> AWAY --> RETURNING --> BACKWARD --> ANSWERING --> OVER
                   |          ^         |          |                          ^
                   |          +-- lost or declined above: sent again          |
                   +--------------------- at the last stage ------------------+

A hop of stage 0 begins as QUEUED and ends after BACKWARD. A hop that only measures skips BACKWARD, except at stage 0. A doubled hop waits
as BACK for the answers to its copies. A copy goes AWAY, RETURNING and BACK, and ends with its hop or before. Every state may end early: the
hop is declined, or the lower stage withdraws it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from gossamer.peer.link.messages import Backward, HopFile, hop_file
from gossamer.peer.pipeline.lane import DownLane, PartFiles, UpLane
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Part
from gossamer.protocol.messages.terms import StageTerms


class HopState(Enum):
    """Where a hop is."""

    ARRIVING = auto()  # its bytes come from the lower stage
    QUEUED = auto()  # own trainer computes the stage's output
    READY = auto()  # the output waits for a lane to the next stage with credit
    AWAY = auto()  # it is sent to the next stage
    RETURNING = auto()  # the gradient's bytes come from the next stage
    BACK = auto()  # the answer is here; those to the same micro-batch under other names are not
    BACKWARD = auto()  # own trainer computes the gradient of the stage's input
    ANSWERING = auto()  # that gradient is sent to the lower stage
    OVER = auto()


AT_TRAINER = (HopState.QUEUED, HopState.BACKWARD)


@dataclass(frozen=True, slots=True)
class HopSource:
    """Where a hop came from: a lane from the lower stage, and the hop's number on it."""

    lane: UpLane
    number: int


class Asked(NamedTuple):
    """Who is asked for an answer. The group is that at the time of the hop: a partner without a lane has none at the node."""

    partner: PeerId
    group: str | None  # None: not known yet


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


@dataclass(slots=True, eq=False)
class Hop:
    """A micro-batch at this holder."""

    number: int  # the node's, in the names of its files
    name: bytes  # the micro-batch's, the same at every stage
    source: HopSource | None  # None: begun here
    state: HopState
    measure: bool = False
    own_steps: int = 0  # of own trainer at its forward pass
    is_known: bool = False  # a holder that was asked has added this micro-batch already, or may have
    tries: int = 0  # how often it was sent to the next stage
    tried: set[int] = field(default_factory=set)  # the lanes
    away: Away | None = None  # in the states AWAY and RETURNING
    loss: float | None = None
    unread_s: float = math.inf  # in the state ANSWERING: when the lower stage should have read the answer
    copies: list[Hop] = field(default_factory=list)  # the same micro-batch under other names, at other holders
    copy_of: Hop | None = None
    asked: Asked | None = None  # to whom it was sent last

    @property
    def is_work(self) -> bool:
        """Whether own trainer has something to compute for it now."""
        return self.state in AT_TRAINER

    @property
    def next_s(self) -> float:
        """Return when a look at it is due; infinite while it waits for no time."""
        return self.unread_s if self.away is None else min(self.away.overdue_s, self.away.notice_s)

    @property
    def are_all_back(self) -> bool:
        """Whether it waits for its backward pass, and the answers to its copies are here."""
        return all(one.state is HopState.BACK for one in (self, *self.copies))

    @property
    def answered(self) -> dict[int, Asked]:
        """Return who has answered it and its copies, by their numbers."""
        is_answered = (HopState.BACK, HopState.BACKWARD)
        return {one.number: one.asked for one in (self, *self.copies) if one.state in is_answered and one.asked is not None}

    @property
    def original(self) -> Hop:
        """The hop of which this is a copy, or itself."""
        return self.copy_of or self

    @property
    def sent_by(self) -> PeerId | None:
        """The partner that has sent it from below; None if it began here."""
        return None if self.source is None else self.source.lane.partner

    @property
    def is_fresh(self) -> bool:
        """Whether it began here and is away for the first time, so that nobody but the partner has seen its name."""
        return self.source is None and self.tries == 1

    def addable(self, stage: StageTerms) -> bytes:
        """Return its name if own trainer adds its gradient by the open request; nothing if it adds none."""
        adds = not self.measure and (self.state is HopState.BACKWARD or (stage.is_last and self.state is HopState.QUEUED))
        return self.name if adds else b""

    def copied(self, number: int, name: bytes) -> Hop:
        """Return a new copy under another name: nobody can tell it from another micro-batch."""
        copy = Hop(number, name, None, HopState.READY, copy_of=self)
        self.copies.append(copy)
        return copy

    def backward(self, source: str) -> Backward:
        """Return the request for its backward pass, once all answers are here. `source`: as in Forward."""
        assert self.loss is not None
        copies = tuple((copy.number, copy.loss) for copy in self.copies if copy.loss is not None)
        return Backward(self.number, self.name.hex(), self.measure, source, self.own_steps, self.loss, copies)

    def parts(self, stage: StageTerms) -> PartFiles:
        """Return what goes to the next stage."""
        tokens = HopFile.OWN_TOKENS if self.source is None else HopFile.PARTNER_TOKENS
        return (
            (Part.TOKENS, hop_file(self.number, tokens), stage.token_bytes),
            (Part.ACTIVATIONS, hop_file(self.number, HopFile.OWN_FORWARD), stage.value_bytes),
        )


def arriving_parts(hop: int, stage: StageTerms) -> PartFiles:
    """Return what comes from the stage before."""
    return (
        (Part.TOKENS, hop_file(hop, HopFile.PARTNER_TOKENS), stage.token_bytes),
        (Part.ACTIVATIONS, hop_file(hop, HopFile.PARTNER_FORWARD), stage.value_bytes),
    )


def hop_numbers(rng: random.Random) -> Iterator[int]:
    """Count hops from a random number: an earlier node of the same trainer used others."""
    return itertools.count(rng.getrandbits(48))
