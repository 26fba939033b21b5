"""The commands of a carrier: what it asks the driver for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gossamer.peer.link.messages import HopRequest
from gossamer.peer.pipeline.lane import PartFiles
from gossamer.protocol.errors import PeerMisbehaved
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import HopAnswer, HopForward, HopNotice


class HopOutcome(Enum):
    """How a hop ended at this holder."""

    ANSWERED = "answered"  # its gradient has gone to the lower stage
    TRAINED = "trained"  # at stage 0: its gradient is added
    MEASURED = "measured"  # at stage 0: the loss of held-out text is here
    DECLINED = "declined"  # not carried out; the lower stage sends it to another holder
    PASSED_OVER = "passed over"  # at stage 0: not carried out by anybody in time
    WITHDRAWN = "withdrawn"  # the lower stage does not want it any more, or its lane has ended


@dataclass(frozen=True, slots=True)
class AskForHop:
    """Send a request to own trainer; TrainerReplied or HopLost follows."""

    request: HopRequest


@dataclass(frozen=True, slots=True)
class SendHop:
    """Send a message, then these files as chunks. HopSent follows for an answer, FileLost where a file is not whole."""

    lane: int
    hop: int
    message: HopForward | HopAnswer
    files: PartFiles


@dataclass(frozen=True, slots=True)
class SendNotice:
    """Send a notice before the next chunk. With WITHDRAWN, send no more of that hop."""

    lane: int
    message: HopNotice


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """Append bytes to a file of the payload folder, or begin it anew. FileLost follows where the folder is full."""

    hop: int
    file: str
    data: bytes
    is_first: bool  # an earlier try may have left a part of this file


@dataclass(frozen=True, slots=True)
class RemoveHop:
    """Remove every file of a hop."""

    hop: int


@dataclass(frozen=True, slots=True)
class CloseLane:
    """End a lane; it is forgotten already."""

    lane: int
    reason: str
    fault: PeerMisbehaved | None = None  # the partner's
    silent_s: float = 0.0  # how long the partner was waited for in vain
    is_over: bool = False  # the run has ended for the side that ends the lane


@dataclass(frozen=True, slots=True)
class HearClock:
    """The partner of a lane has told its global step."""

    lane: int
    global_step: int


@dataclass(frozen=True, slots=True)
class HopOver:
    """A hop is over."""

    hop: int
    outcome: HopOutcome
    tries: int  # how often it was sent to the next stage
    loss: float | None = None  # nats per token, where it is known
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AnswersCompared:
    """Partners have answered the same micro-batch. `odd` is the one whose answer is unlike the others."""

    partners: tuple[PeerId, ...]
    odd: PeerId | None = None
    num_odd: int = 0  # its odd answers since its last rest
    must_rest: bool = False
    evidence: str = ""  # without an odd one: why none of the answers is used; empty: they are alike


@dataclass(frozen=True, slots=True)
class SourceOpposed:
    """The micro-batches of a partner below lead the weights against those of all others."""

    partner: PeerId
    evidence: str


Command = AskForHop | SendHop | SendNotice | StoreChunk | RemoveHop | CloseLane | HearClock | HopOver | AnswersCompared | SourceOpposed
