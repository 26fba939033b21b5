"""What a meeting machine takes in and what it asks for: every event and every command, in one small file.

`Greeting` is what a side knows before the meeting begins: enough to write its own Hello and to check the partner's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from peer.requests import Opened, Reply, Request, Stage
from protocol.errors import PeerMisbehaved
from protocol.identity import Identity, PeerId
from protocol.messages import Credential, Hello, Message, Outcome, Part, Phase, RefusalCode
from protocol.terms import RunTerms, check_hello

_PHASES = {Stage.TRAIN: Phase.TRAIN, Stage.FINISH: Phase.FINISH}
_STAGES = {phase: stage for stage, phase in _PHASES.items()}

# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Started:
    """The stream to the partner is there; begin."""


@dataclass(frozen=True, slots=True)
class TrainerAnswered:
    """Own trainer replied to the last Tell."""

    reply: Reply


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
    """The partner told what it decided (answer to AskAgain)."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The meeting has taken as long as it may."""


@dataclass(frozen=True, slots=True)
class TrainerGone:
    """The link to own trainer broke."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Own operator leaves, or the node gives way."""

    reason: str


Event = Started | TrainerAnswered | PartnerSent | PartnerGone | PartnerBroke | Resolved | DeadlinePassed | TrainerGone | Stopped

# --------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Tell:
    """Ask own trainer; its reply comes back as TrainerAnswered."""

    request: Request


@dataclass(frozen=True, slots=True)
class Send:
    """Send one frame to the partner."""

    message: Message


@dataclass(frozen=True, slots=True)
class SendPart:
    """Send the file of own sketch or payload as chunks, beside whatever else goes on."""

    part: Part


@dataclass(frozen=True, slots=True)
class Store:
    """Add bytes to the file of the partner's sketch or payload."""

    part: Part
    data: bytes


@dataclass(frozen=True, slots=True)
class Journal:
    """Write to disk that the meeting counts, before anything that follows."""

    meeting_id: bytes
    failed_blocks: bytes


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Open a new stream to the partner and ask what it decided, until it answers; the answer comes back as Resolved."""

    meeting_id: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Tell own trainer to forget the meeting."""


class MeetingOver(Enum):
    """How a meeting ended."""

    COMPLETED = auto()
    BUSY = auto()  # one of the two is in another meeting
    REFUSED = auto()  # by the partner, or its terms by us
    GATED = auto()  # the partner's message failed our merge gate
    MISBEHAVED = auto()  # the partner broke the rules
    FAILED = auto()  # network, deadline, own trainer


@dataclass(frozen=True, slots=True)
class Finish:
    """The meeting is over."""

    over: MeetingOver
    reason: str
    refusal: RefusalCode | None = None  # the partner's code, when it refused


Command = Tell | Send | SendPart | Store | Journal | AskAgain | Drop | Finish

# --------------------------------------------------------------------------- what is known before


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a side knows before its meeting begins."""

    identity: Identity
    partner: PeerId  # as the lane proved it
    terms: RunTerms
    fragment: int
    nonce: bytes  # 16 fresh random bytes
    partner_hello: Hello | None  # verified; None on the initiator's side
    credential: Credential | None
    acquaintances: tuple[bytes, ...]
    now_s: Callable[[], float]  # Unix time, for expiry of credentials

    def own_hello(self, tokens: int, clock_steps: int, stage: Stage) -> Hello:
        """Write and sign this side's Hello."""
        fragment = self.terms.fragments[self.fragment]
        hello = Hello(
            protocol_version=self.terms.protocol_version,
            run_id=self.terms.run_id,
            sender=self.identity.peer_id,
            receiver=self.partner,
            nonce=self.nonce,
            partner_nonce=b"" if self.partner_hello is None else self.partner_hello.nonce,
            fragment=self.fragment,
            codec=self.terms.codec_id,
            tokens=tokens,
            clock_steps=clock_steps,
            sketch_bytes=fragment.sketch_bytes,
            payload_bytes=fragment.payload_bytes,
            phase=_PHASES[stage] if self.partner_hello is None else self.partner_hello.phase,
            credential=self.credential,
            acquaintances=self.acquaintances,
            signature=b"",
        )
        return hello.signed(self.identity)

    def check_reply(self, hello: Hello, opened: Opened) -> Hello:
        """Check the responder's Hello and return our own that it answers. Raises Refused or PeerMisbehaved."""
        own = self.own_hello(opened.tokens, opened.clock_steps, opened.stage)
        check_hello(hello, self.terms, self.identity.peer_id, self.partner, self.now_s(), own_hello=own)
        return own

    def stage_of(self, initiator: Hello) -> Stage:
        """Return the stage that the initiator's Hello asks for; both sides use it."""
        return _STAGES[initiator.phase]
