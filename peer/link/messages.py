"""The records of the link, in order: the node's requests with a reply and without, the trainer's replies and reports. See socket.py.

A request gets the reply that its class names, or none. Requests for coding or a copy are answered at once, the others at the trainer's
next step boundary or while its weights are only read (peer/trainer/exchange.py). Bulk bytes never travel in a record: they lie in the
payload folder under the names of `payload_name`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Generic, Literal, TypeGuard, TypeVar, dataclass_transform

from pydantic import ConfigDict, Discriminator, TypeAdapter, ValidationError

from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.terms import ModelPlan

RecordT = TypeVar("RecordT")


class Writer(Enum):
    """Which process writes a file of the payload folder, and removes it when it restarts; the trainer also for each new node."""

    TRAINER = ("*.own-*", "copy-*")  # the names' patterns
    NODE = ("*.partner-*",)


class HopFile(Enum):
    """The files of one hop in the payload folder; `OWN` ones are written by the trainer, `PARTNER` ones by the node."""

    OWN_TOKENS = "own-tokens"  # at stage 0: its micro-batch as little-endian u32, micro_batch x (sequence_length + 1)
    OWN_FORWARD = "own-forward"  # the stage's output, coded
    OWN_BACKWARD = "own-backward"  # the gradient of the stage's input, coded
    PARTNER_TOKENS = "partner-tokens"  # above stage 0, as at stage 0
    PARTNER_FORWARD = "partner-forward"  # the stage's input, coded
    PARTNER_BACKWARD = "partner-backward"  # the gradient of the stage's output, coded


class File(Enum):
    """The files of one meeting in the payload folder; `OWN` ones are written by the trainer, `PARTNER` ones by the node."""

    OWN_SKETCH = "own-sketch"
    OWN_PAYLOAD = "own-payload"
    PARTNER_SKETCH = "partner-sketch"
    PARTNER_PAYLOAD = "partner-payload"


def payload_name(meeting: int | str, file: File) -> str:
    """Name the file of a meeting, or of a fragment sync, in the payload folder."""
    return f"{meeting}.{file.value}"


def hop_file(hop: int, file: HopFile) -> str:
    """Name the file of a hop in the payload folder."""
    return f"hop-{hop}.{file.value}"


@dataclass_transform(frozen_default=True)
class LinkRecord:
    """Makes a frozen dataclass of each subclass, whose last field `record` is the subclass's name and identifies it in a line."""

    def __init_subclass__(cls) -> None:
        cls.__annotations__["record"] = Literal[cls.__name__]
        setattr(cls, "record", field(default=cls.__name__, kw_only=True, repr=False))  # noqa: B010 - not for type checkers
        dataclass(frozen=True)(cls)


class OfMeeting(LinkRecord):
    """A record about one meeting."""

    meeting: int  # the node's own number for it, never reused in its life


class OfFile(LinkRecord):
    """A record about one file of the payload folder, or about one fragment sync: its name is in the names of its files."""

    name: str


class OfHop(LinkRecord):
    """A record about one hop of a staged run: a micro-batch at this stage, forward and back."""

    hop: int  # the node's own number for it, never reused in its life


class Open(OfMeeting):
    """Lock a fragment for a meeting and snapshot its fast weights. Answered by Opened or Unavailable."""

    fragment: int


class Prepare(OfMeeting):
    """Form the message from both sides' tokens. Answered by SketchReady, or PayloadReady where the codec has no sketch."""

    partner_tokens: int
    partner_global_step: int
    seed: int  # both sides derive the same one from their nonces
    phase: RunPhase


class Encode(OfMeeting):
    """Encode the message now that the partner's sketch lies in its file. Answered by PayloadReady."""


class Check(OfMeeting):
    """Decode the partner's payload and judge it without applying it. Answered by Checked."""

    must_probe: bool = True  # measure in any case what the merge does to the loss on own text; False: in a random share of the meetings
    share: float = 1.0  # of the longest gap that honest training explains: the most that may be merged of this partner's
    most_part: float = 1.0  # of the outer step with this partner, that is taken at most
    place: str = ""  # the partner's network, or the partner where that is unknown: the merge gate counts each place once


class Apply(OfMeeting):
    """Take the outer step of a meeting that counts. Answered by Applied; a second one with the same id changes nothing."""

    meeting_id: str  # hex; both sides' name for it, journaled
    failed_blocks: str  # hex bitmap; these blocks are taken as if there were no partner


class CopyState(OfFile):
    """Write the slow weights of every fragment to `name` in the payload folder, beside the inner steps. Answered by Written."""


class BringUp(OfFile):
    """Take the outer step of fragments that have long waited for a partner alone, before a copy of the state. Answered by Written."""


class WriteResult(OfFile):
    """End the last averaging alone, round the weights as they are sent, and write the state to `name`. Answered by Written."""


class SketchSlow(OfFile):
    """Begin the sync of a fragment: write a sketch of its slow weights, beside the inner steps. Answered by Written."""

    fragment: int
    seed: int  # both sides derive the same one from the request


class CodeSlow(OfFile):
    """Be the source of a fragment sync: code our slow weights against the other peer's sketch. Answered by Written."""

    fragment: int
    seed: int


class DecodeSlow(OfFile):
    """Decode the source's answer, beside the inner steps, and keep it for MoveFragments. Answered by Written."""


class MoveFragments(OfFile):
    """Move fragments by what was decoded, if that predicts no worse, and take over a clock that is ahead. Answered by FragmentsMoved."""

    sources: tuple[tuple[str, ...], ...]  # the names of the fragment syncs, by source, each of which may move by itself
    global_step: int


class Adopt(OfFile):
    """Replace weights and clock by a fetched state, and warm up again, if that state is better than ours.

    `name` includes the folder. Answered by Adopted. Open meetings are dropped; a trainer that has not begun begins. A state that is not
    accepted changes nothing.
    """

    global_step: int
    is_result: bool = False  # the run's result: the run ends with it, whatever our clock
    is_agreed: bool = False  # most partners have taken it: only its form is judged
    takes_clock: bool = True  # of a state with a higher loss than ours, the global step alone is taken over
    may_begin: bool = False  # with such a state, a program that has not begun begins with the weights that it came with
    num_splits: int = 0  # results on which the partners have not agreed before: the more, the more loss is allowed


class Hold(LinkRecord):
    """Build and hold this stage from now on: the reply to Fits."""

    stage: int  # from 0


class Begin(OfHop):
    """At stage 0: begin a micro-batch. Answered by Forwarded, or Declined.

    Forwarded follows OWN_TOKENS and OWN_FORWARD. The trainer takes the next windows of its text in the order of these requests. It may take
    a held-out window instead, and says so in Forwarded.
    """

    name: str  # hex; 16 random bytes: the micro-batch's name at every stage


class Forward(OfHop):
    """Compute the stage's output from PARTNER_TOKENS and PARTNER_FORWARD. Answered by Forwarded, Returned at the last stage, or Declined.

    Forwarded follows OWN_FORWARD. The last stage computes its backward pass at once: Returned follows OWN_BACKWARD, if not `measure`, and
    the gradient of its weights is added. The trainer keeps nothing of the hop: the files stay until it is over.
    """

    name: str  # hex; as in Begin
    measure: bool = False  # held-out text: no gradient is wanted
    lower_step: int = 0  # typical global step of the holders of the lower stage that send hops here
    source: str = ""  # Sybil group of the holder that has sent it; empty where it is not known yet


class Backward(OfHop):
    """Compute the stage again and its backward pass from PARTNER_BACKWARD; add the gradient. Answered by Returned, Unlike or Declined.

    It comes before any Begin and Forward that waits. Returned follows OWN_BACKWARD, except at stage 0. Of held-out text there is no file
    and nothing to compute: stage 0 notes the loss, and other stages get no Backward. Other holders' answers to the same micro-batch lie in
    PARTNER_BACKWARD of `copies`: the mean of those that are alike is used.
    """

    name: str  # hex; as in Begin and Forward, and so are the next two
    measure: bool
    source: str
    own_steps: int  # as in Forwarded
    loss: float  # nats per token, of this micro-batch at the last stage
    copies: tuple[tuple[int, float], ...] = ()  # hops with their losses


class FollowClock(LinkRecord):
    """Follow the global step of a neighbour of another stage, as that of a partner after a meeting."""

    global_step: int
    is_unlimited: bool = False  # own steps do not limit how far to follow: without it no hop can be carried, or the run is over


class Drop(OfMeeting):
    """Forget a meeting that does not count; the fragment stays due if it was."""


class Solo(LinkRecord):
    """Take the outer step of a fragment alone if it is still due, in a meeting at the end of that and only if that does not count."""

    fragment: int


class Defer(LinkRecord):
    """As Solo, but without an outer step, in a run that waits for a partner: count the fragment down again if it is still due."""

    fragment: int


class StepBack(LinkRecord):
    """Set the clock back to the other peers' global step; the weights stay."""

    global_step: int


class NodeReport(LinkRecord):
    """The line's rate and the node's processor time: about every other second."""

    bytes_per_s: float  # in the slower direction; 0: not measured yet
    cpu_s: float  # processor time of the node process and its daemon, since they started
    probed_bytes_per_s: float = 0.0  # in a staged run: in the slower direction, by an echo; 0: not known yet


class Start(LinkRecord):
    """Begin to train from the run's initial weights."""


class FinishDone(LinkRecord):
    """The last averaging is over, or no partner is left for it: save and end."""


class Opened(OfMeeting):
    """The fragment is locked and its snapshot taken."""

    tokens: int  # trained since the last outer step of this fragment
    global_step: int
    phase: RunPhase
    own_steps: int = 0


class Unavailable(OfMeeting):
    """The request was not carried out and changed nothing."""

    reason: str


class SketchReady(OfMeeting):
    """Own sketch lies in its file."""

    sha256: str  # hex, of the sketch


class PayloadReady(OfMeeting):
    """Own payload lies in its file."""

    sha256: str  # hex, of the payload


class Checked(OfMeeting):
    """The verdict on the partner's payload."""

    accepted: bool
    reason: str  # why not, empty when accepted
    failed_blocks: str  # hex bitmap, lowest bit first; empty: none
    gain: float | None = None  # nats per token by which the merge lowers the loss on own text; None: it was not measured
    deviation: float = 0.0  # of the gain from what is typical, in spreads of honest gains; negative: the merge is worse
    is_harmful: bool = False  # not accepted because of its gain


class Applied(OfMeeting):
    """The outer step is taken, once."""


class Written(OfFile):
    """The requested files are written."""

    reason: str  # why they are not; empty if they are


class FragmentsMoved(OfFile):
    """Which fragments were moved to the sources'."""

    moved: dict[str, float]  # by the name of the fragment sync: the share of the blocks that could not be decoded and were not moved
    reason: str  # why the other fragments were not, if there are any


class Adopted(OfFile):
    """Whether a fetched state is ours now."""

    accepted: bool
    reason: str  # why not; of an accepted state: why only the clock was taken over; else empty
    is_sound: bool = True  # False: it cannot be the state of an honest peer


class Forwarded(OfHop):
    """The stage's output is in its file."""

    measure: bool = False  # at stage 0: this is held-out text
    global_step: int = 0  # the trainer's
    own_steps: int = 0  # of the trainer, for Backward: a gradient of much older weights is declined
    num_gathered: int = 0  # at stage 0: micro-batches in the gradient of the trainer's next step


class Returned(OfHop):
    """The hop is done at this stage: its gradient is added once, and the gradient of its input is in its file, if there is one."""

    loss: float  # nats per token
    odd: int | None = None  # of a hop and its copies: the one whose answer is unlike the others
    evidence: str = ""  # why
    global_step: int = 0  # the trainer's
    opposed: str = ""  # why the source of this hop is to send no more of them; empty if it may
    num_gathered: int = 0  # as in Forwarded


class Unlike(OfHop):
    """The answers to a hop and its copies are unlike each other, and nobody can tell which is right. Nothing was added."""

    evidence: str


class Declined(OfHop):
    """The hop is not carried out, and nothing of it was added."""

    reason: str


class Fits(LinkRecord):
    """The stages that fit this peer's devices: the first record to every node in a staged run, until one is held. Answered by Hold."""

    stages: tuple[int, ...]  # from 0, at least one


class Built(LinkRecord):
    """The sizes of the model on the wire: the first record to every node, which does not know the model. In a staged run, of own stage."""

    plan: ModelPlan
    fits: tuple[int, ...] = ()  # in a staged run: the stages that fit, as in Fits, which a later node does not get


class Due(LinkRecord):
    """A fragment's countdown ran out: find it a partner."""

    fragment: int
    phase: RunPhase


class Progress(LinkRecord):
    """The trainer's counters, about once a second and whenever a node connects."""

    global_step: int
    phase: RunPhase
    started: bool  # it trains, or has trained
    done: bool = False  # it has saved the result and ends
    tokens: int = 0  # trained by this peer since it joined
    own_steps: int = 0  # inner steps made by this peer, over all its sessions


CodingRequest = Prepare | Encode
WritingRequest = CopyState | SketchSlow | CodeSlow | DecodeSlow
MeetingRequest = CodingRequest | Open | Check | Apply
HopRequest = Begin | Forward | Backward
AnsweredRequest = MeetingRequest | WritingRequest | BringUp | WriteResult | Adopt | MoveFragments
AnyTimeRequest = CodingRequest | WritingRequest | NodeReport
BesideRequest = Open | Check | Apply | Drop | Solo | Defer  # these need weights that nobody changes meanwhile
Notification = Drop | Solo | Defer | StepBack | NodeReport | Start | FinishDone | Hold | FollowClock
Request = AnsweredRequest | HopRequest | Notification
HopReply = Forwarded | Returned | Unlike | Declined
Reply = Opened | Unavailable | SketchReady | PayloadReady | Checked | Applied | Written | Adopted | FragmentsMoved
TrainerReport = Fits | Built | Due | Progress
Answer = Reply | HopReply | TrainerReport


def subject(record: AnsweredRequest | HopRequest | Reply | HopReply) -> int | str:
    """Return the subject of a request or a reply, by which they match: a meeting's number, or the name of a hop or a file."""
    match record:
        case OfMeeting():
            return record.meeting
        case OfHop():
            return f"hop-{record.hop}"
    return record.name


def is_about_result(request: Request) -> TypeGuard[WriteResult | Adopt]:
    """Return whether a request is about the run's result."""
    return isinstance(request, WriteResult) or (isinstance(request, Adopt) and request.is_result)


def not_done(request: Request, reason: str) -> Reply | None:
    """Return the reply to a request that could not be carried out; None for one that has no such reply."""
    if isinstance(request, MeetingRequest):
        return Unavailable(request.meeting, reason)
    if isinstance(request, WritingRequest):
        return Written(request.name, reason)
    if isinstance(request, Adopt):
        return Adopted(request.name, False, reason)
    return FragmentsMoved(request.name, {}, reason) if isinstance(request, MoveFragments) else None


class Lines(Generic[RecordT]):
    """The records of one side of the link, as lines of JSON."""

    def __init__(self, records: TypeAdapter[RecordT]) -> None:
        self._records = records

    def write(self, record: RecordT) -> bytes:
        """Return the line of a record."""
        return self._records.dump_json(record) + b"\n"

    def read(self, line: bytes) -> RecordT:
        """Read a record back. Raises ValueError for a line that this side never sends: a bug, for both ends are our own processes."""
        try:
            return self._records.validate_json(line)
        except ValidationError as error:
            raise ValueError(f"not a record of this side of the link: {line[:100]!r}") from error


_STRICT = ConfigDict(extra="forbid", strict=True)
REQUESTS: Lines[Request] = Lines(TypeAdapter(Annotated[Request, Discriminator("record")], config=_STRICT))
ANSWERS: Lines[Answer] = Lines(TypeAdapter(Annotated[Answer, Discriminator("record")], config=_STRICT))
