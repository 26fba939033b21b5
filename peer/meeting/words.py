"""The words of the meeting machine: its stages, what it takes in (events) and what it asks for (commands)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from gossamer.peer.link.messages import MeetingRequest, Reply
from gossamer.protocol.errors import PeerMisbehaved, RefusalCode
from gossamer.protocol.messages.messages import Message, Outcome, Part

# --------------------------------------------------------------------------- stages


class MeetingState(Enum):
    """Where a side of a meeting stands."""

    OPENING = auto()  # own trainer snapshots the fragment
    CONNECTING = auto()  # the partner is called (initiator only)
    GREETING = auto()  # own Hello is out (initiator only)
    PREPARING = auto()  # own trainer forms the message
    SKETCHING = auto()  # own sketch is out, the partner's is not complete
    ENCODING = auto()  # own trainer encodes against the partner's sketch
    COMMITTING = auto()  # own commitment is out, the partner's is not here
    EXCHANGING = auto()  # own payload is out, the partner's is not complete
    CHECKING = auto()  # own trainer decodes and judges
    JUDGING = auto()  # own verdict is known; the other side's, or the decision, is not
    IN_DOUBT = auto()  # responder only: the stream broke before the decision came
    RECORDING = auto()  # it counts; own disk writes it down
    APPLYING = auto()  # own trainer takes the outer step
    CONFIRMING = auto()  # initiator only: the outer step is taken, the partner has not said that it knows
    OVER = auto()


DECIDED = frozenset({MeetingState.RECORDING, MeetingState.APPLYING, MeetingState.CONFIRMING})
TRAINERS_TURN = frozenset({MeetingState.OPENING, MeetingState.PREPARING, MeetingState.ENCODING, MeetingState.CHECKING})
UNHEARD = frozenset({MeetingState.OPENING, MeetingState.CONNECTING})  # on the initiator's side: the partner does not know of it

# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Started:
    """Begin: the responder has its stream already."""


@dataclass(frozen=True, slots=True)
class TrainerAnswered:
    """Own trainer replied to the last Tell."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class Connected:
    """The stream to the partner is there."""


@dataclass(frozen=True, slots=True)
class PartnerSent:
    """A well-formed frame came from the partner."""

    message: Message


@dataclass(frozen=True, slots=True)
class PartnerGone:
    """The stream has ended."""


@dataclass(frozen=True, slots=True)
class PartnerBroke:
    """What came from the partner was not a message."""

    error: PeerMisbehaved


@dataclass(frozen=True, slots=True)
class Resolved:
    """The partner told what it decided: the answer to AskAgain."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Journaled:
    """The decision is on the disk."""


@dataclass(frozen=True, slots=True)
class NotJournaled:
    """The disk did not take the decision."""

    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The time that was last allowed is over."""


@dataclass(frozen=True, slots=True)
class TrainerGone:
    """The link to own trainer broke."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Our own side wants no more of it."""

    reason: str
    code: RefusalCode  # what the partner is told


Event = (
    Started | TrainerAnswered | Connected | PartnerSent | PartnerGone | PartnerBroke | Resolved | Journaled | NotJournaled | DeadlinePassed
    | TrainerGone | Stopped
)  # fmt: skip

# --------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Tell:
    """Ask own trainer; its reply comes back as TrainerAnswered, or TrainerGone does."""

    request: MeetingRequest


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a stream to the partner; Connected or PartnerGone comes back."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send one frame to the partner."""

    message: Message


@dataclass(frozen=True, slots=True)
class SendPart:
    """Send the file of own sketch or payload as chunks."""

    part: Part


@dataclass(frozen=True, slots=True)
class Store:
    """Add bytes to the file of the partner's sketch or payload."""

    part: Part
    data: bytes


@dataclass(frozen=True, slots=True)
class WriteDown:
    """Write to disk that the meeting counts; Journaled or NotJournaled comes back."""

    meeting_id: bytes
    failed_blocks: bytes


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Open a new stream to the partner and ask what it decided, until it answers; the answer comes back as Resolved."""

    meeting_id: bytes


@dataclass(frozen=True, slots=True)
class Allow:
    """Have DeadlinePassed come after this time instead of when it was to come."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Forget:
    """Tell own trainer to forget the meeting."""


class MeetingOutcome(Enum):
    """How a meeting ended."""

    COMPLETED = auto()  # it counts
    BUSY = auto()  # one of the two is in another meeting
    REFUSED = auto()  # by the partner, or its terms by us
    GATED = auto()  # the partner's message failed our merge gate
    MISBEHAVED = auto()  # the partner broke the rules
    FAILED = auto()  # the network's fault, or the partner's
    ABANDONED = auto()  # for a reason of our own: leaving, trainer or disk in trouble


@dataclass(frozen=True, slots=True)
class Finish:
    """The meeting is over."""

    outcome: MeetingOutcome
    reason: str
    refusal: RefusalCode | None = None  # the partner's code, when it refused


Command = Tell | Connect | Send | SendPart | Store | WriteDown | AskAgain | Allow | Forget | Finish
