"""One lane to a holder of a neighbouring stage: credit, the bytes that are coming, usual times.

A lane belongs to the carrier from LaneOpened to LaneGone or CloseLane.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_high

from gossamer.protocol.errors import BadMessage
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import SLOWEST_BYTES_PER_S, WINDOW
from gossamer.protocol.messages.messages import Chunk, Part
from gossamer.protocol.messages.terms import StageTerms
from gossamer.protocol.newest import keep_newest

PATIENCE = 3.0  # times the usual answer of a lane
LEAST_PATIENCE_S = 5.0
FIRST_PATIENCE_S = 30.0  # before the first answer, beside the time of the bytes on the slowest line
MOST_PATIENCE_S = 60.0  # at any time, beside the time of the bytes on the slowest line
STRANGER_PATIENCE = 10.0  # before the first answer: times the typical answer of the lanes beside it, if any has answered
LEARNING = 0.2  # weight of the last answer in the usual time
REST_S = (1.0, 8.0)  # without new hops after a decline: doubles from the first to the second
WITHDRAWN_KEPT = WINDOW  # withdrawn hops whose answer may still come: all of a lane
IDLE_S = 30.0  # a lane without a hop for so long takes no share of the windows, and makes room for another one
FIRST_WINDOW = 2  # one hop at the trainer, one on its way


PartFiles = tuple[tuple[Part, str, int], ...]  # the bytes that follow a message, with their files and their sizes in bytes


@dataclass(slots=True)
class Incoming:
    """The chunks that follow a message: parts in a fixed order, each of a fixed size."""

    number: int  # of the hop on the lane
    parts: PartFiles
    hop: int | None  # the node's number; None: nobody wants the bytes any more
    at_s: float  # when the last bytes came
    _index: int = 0
    _offset: int = 0

    def take(self, chunk: Chunk, now_s: float) -> str:
        """Count a chunk and return its file. Raises BadMessage for another part, order or length."""
        part, file, num_bytes = self.parts[self._index]
        if (chunk.part, chunk.offset) != (part, self._offset) or self._offset + len(chunk.data) > num_bytes:
            raise BadMessage(f"a chunk of {chunk.part.name.lower()} at {chunk.offset}; expected {part.name.lower()} at {self._offset}")
        self._offset += len(chunk.data)
        if self._offset == num_bytes:
            self._index, self._offset = self._index + 1, 0
        self.at_s = now_s
        return file

    @property
    def is_complete(self) -> bool:
        """Whether every part is here."""
        return self._index == len(self.parts)


@dataclass(slots=True)
class UpLane:
    """A lane from a holder of the lower stage, which sends hops here."""

    number: int
    partner: PeerId
    window: int  # hops that we have granted
    unanswered: dict[int, int] = field(default_factory=dict)  # our number of each hop, by its number on the lane
    incoming: Incoming | None = None
    last: int = 0  # the newest hop's number on the lane
    active_s: float = -math.inf  # when it came
    global_step: int = 0  # the partner's, with its newest hop
    answers: int = 0  # that have left
    num_answering: int = 0  # of `unanswered`: their answers wait, or are being sent
    most_granted: int = 0  # a smaller window counts only once the partner knows it
    _until_known: int = 0  # more hops, until one is sent for which the partner must have read the smaller window

    def accept(self, number: int) -> None:
        """Check the number and the credit of a new hop. Raises BadMessage."""
        if self.incoming is not None:
            raise BadMessage(f"hop {number} before the bytes of hop {self.incoming.number}")
        if number <= self.last:
            raise BadMessage(f"hop {number} after hop {self.last}")
        may_be_answered = min(1, self.num_answering)  # the partner may have the last byte before we hear that it has left
        if len(self.unanswered) - may_be_answered >= max(self.window, self.most_granted):
            raise BadMessage(f"hop {number} beyond the window of {max(self.window, self.most_granted)}")
        self.last = number
        if self._until_known:
            self._until_known -= 1
            if not self._until_known:
                self.most_granted = self.window

    def release(self, number: int, *, is_answering: bool, is_answered: bool) -> None:
        """Free the credit of a hop that is over."""
        if self.unanswered.pop(number, None) is None:
            return
        self.num_answering -= is_answering
        self.answers += is_answered
        if self._until_known and not is_answered:
            self._until_known += 1  # the partner may have replaced it before it has read anything

    def is_active(self, now_s: float) -> bool:
        """Return whether it carries a hop, or has lately."""
        return bool(self.unanswered) or now_s - self.active_s < IDLE_S

    def grant(self, window: int) -> int:
        """Change the window with the answer to a hop, and return it.

        A partner that has not read this answer has all hops unanswered that have no earlier one, and at most `most_granted` of them.
        """
        self.most_granted = max(self.most_granted, self.window, window)
        if window < self.window:
            self._until_known = self.most_granted - (len(self.unanswered) - self.num_answering) + 1
        self.window = window
        return window

    def answer_patience_s(self, value_bytes: int) -> float:
        """Return how long an answer may take to leave behind all others, on the slowest line."""
        return FIRST_PATIENCE_S + max(self.window, self.most_granted) * value_bytes / SLOWEST_BYTES_PER_S

    def overdue_s(self) -> float:
        """Return when the partner has been silent for too long in the middle of a hop."""
        return math.inf if self.incoming is None else self.incoming.at_s + FIRST_PATIENCE_S


def typical_step(lanes: Iterable[UpLane], groups: Mapping[PeerId, str]) -> int:
    """Return the upper median of the Sybil groups' global steps, each the upper median of its lanes that have carried hops; 0 for none."""
    steps: dict[str, list[int]] = {}
    for lane in lanes:
        if lane.last:
            steps.setdefault(groups.get(lane.partner, str(lane.partner)), []).append(lane.global_step)
    return median_high(map(median_high, steps.values())) if steps else 0


@dataclass(slots=True)
class DownLane:
    """A lane to a holder of the next stage, which answers hops."""

    number: int
    partner: PeerId
    window: int  # hops that the partner has granted
    first_patience_s: float = FIRST_PATIENCE_S
    most_patience_s: float = MOST_PATIENCE_S
    typical_s: float = 0.0  # of the lanes to the next stage that have answered; 0: none has
    active_s: float = -math.inf  # when the last answer was complete
    unanswered: dict[int, int] = field(default_factory=dict)  # our number of each hop, by its number on the lane
    incoming: Incoming | None = None
    last: int = 0  # the newest hop's number on the lane
    usual_s: float = 0.0  # of recent answers; 0: none yet
    answers: int = 0
    rests_until_s: float = -math.inf
    _declines: int = 0  # in a row
    _withdrawn: dict[int, bool] = field(default_factory=dict)  # whether a withdrawn hop only measures

    @classmethod
    def opened(cls, number: int, partner: PeerId, window: int, stage: StageTerms, waited_s: float = 0.0) -> DownLane:
        """Make the lane after both sides have greeted.

        A stranger gets the time of the bytes through the stages that are left; a partner that was waited for in vain gets longer, within
        MOST_PATIENCE_S.
        """
        transfer_s = stage.num_above * (stage.forward_bytes + stage.value_bytes) / SLOWEST_BYTES_PER_S
        return cls(number, partner, window, FIRST_PATIENCE_S + transfer_s + PATIENCE * waited_s, MOST_PATIENCE_S + transfer_s)

    @property
    def patience_s(self) -> float:
        """Return how long an answer may take."""
        if self.answers:
            return min(self.most_patience_s, max(LEAST_PATIENCE_S, PATIENCE * self.usual_s))
        near_s = max(2 * LEAST_PATIENCE_S, STRANGER_PATIENCE * self.typical_s) if self.typical_s else math.inf
        return min(self.most_patience_s, self.first_patience_s, near_s)

    @property
    def notice_s(self) -> float:
        """Return after how long without an answer the lower stage is told to wait: before its own patience ends."""
        return max(LEAST_PATIENCE_S, PATIENCE * self.typical_s) / 2

    @property
    def is_quiet(self) -> bool:
        """Whether no answer is awaited, and the bytes of none that is wanted are coming."""
        return not self.unanswered and (self.incoming is None or self.incoming.hop is None)

    def credit(self, now_s: float) -> int:
        """Return how many more hops may go now: within the window, and within what answers have earned; none while the lane rests."""
        return 0 if now_s < self.rests_until_s else max(0, min(self.window, FIRST_WINDOW + self.answers) - len(self.unanswered))

    def send(self, hop: int) -> int:
        """Count a hop against the window, and return its number on the lane."""
        self.last += 1
        self.unanswered[self.last] = hop
        return self.last

    def withdraw(self, number: int, *, measure: bool) -> None:
        """Note that an answer is not wanted any more; it may come nevertheless."""
        if self.unanswered.pop(number, None) is not None:
            keep_newest(self._withdrawn, number, measure, WITHDRAWN_KEPT)
        elif self.incoming is not None and self.incoming.number == number:
            self.incoming.hop = None

    def take_answer(self, number: int, window: int) -> tuple[int | None, bool]:
        """Return the hop that an answer is about, None for a withdrawn one; and whether that one only measured. Raises BadMessage."""
        if not window:
            raise BadMessage("a window without a hop")
        if self.incoming is not None:
            raise BadMessage(f"an answer to hop {number} before the bytes of the answer to hop {self.incoming.number}")
        self.window = window
        if number in self._withdrawn:
            return None, self._withdrawn.pop(number)
        if number not in self.unanswered:
            raise BadMessage(f"an answer to hop {number}, which waits for none")
        return self.unanswered.pop(number), False

    def take_decline(self, number: int, now_s: float) -> int | None:
        """Return the hop that is declined, None for one that is over. The lane rests. Raises BadMessage."""
        if number > self.last:
            raise BadMessage(f"a notice about hop {number}, which was not sent")
        self._withdrawn.pop(number, None)
        hop = self.unanswered.pop(number, None)
        if hop is not None:
            self.rest(now_s)
        return hop

    def rest(self, now_s: float) -> None:
        """Take no hop for a while, longer each time in a row."""
        first_s, most_s = REST_S
        self.rests_until_s = max(self.rests_until_s, now_s + min(most_s, first_s * 2**self._declines))
        self._declines = min(self._declines + 1, 16)

    def note_answer(self, took_s: float, now_s: float) -> None:
        """Learn from a complete answer."""
        self.active_s = now_s
        self.usual_s += (took_s - self.usual_s) * (LEARNING if self.answers else 1.0)
        self.answers += 1
        self._declines = 0
