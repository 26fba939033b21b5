"""What a side of a meeting knows at its start, its states and timers, and how it can end."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from enum import Enum, auto

from gossamer.peer.link.messages import Opened
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.swarm.partner_records import Trust
from gossamer.protocol.errors import RefusalCode, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Hello, RunPhase
from gossamer.protocol.messages.terms import FragmentTerms, check_hello


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a side knows before its meeting starts: enough to write its own Hello and to check the partner's."""

    membership: Membership
    partner: PeerId  # as the transport has authenticated it
    fragment: int
    nonce: bytes  # 16 fresh random bytes
    now_s: float  # Unix time, for the expiry of credentials
    partner_hello: Hello | None = None  # verified; None on the initiator's side
    records: tuple[bytes, ...] = ()  # signed member records for peer exchange: our own, and other peers'
    timeout_s: float = math.inf  # timeout for a silent partner, from earlier meetings; the run's deadline bounds it
    trust: Trust = Trust()  # how far the partner is trusted, by its record
    place: str = ""  # the partner's, as the address book has it

    @property
    def fragment_terms(self) -> FragmentTerms:
        """Return the sizes that the manifest implies for this meeting."""
        return self.membership.terms.fragments[self.fragment]

    def hello(self, opened: Opened) -> Hello:
        """Write and sign this side's Hello. Raises Refused if the partner is in the last averaging and our own trainer is not."""
        membership, sizes = self.membership, self.fragment_terms
        partner_nonce = self.partner_hello.opening.nonce if self.partner_hello else b""
        hello = Hello(
            opening=membership.opening(self.partner, self.nonce, partner_nonce, self.records),
            fragment=self.fragment,
            codec=membership.terms.codec_id,
            tokens=opened.tokens,
            global_step=opened.global_step,
            sketch_bytes=sizes.sketch_bytes,
            payload_bytes=sizes.payload_bytes,
            phase=self._phase(opened.phase),
            own_steps=opened.own_steps,
        )
        return hello.signed(membership.identity)

    def _phase(self, own: RunPhase) -> RunPhase:
        if self.partner_hello is None:
            return own
        if self.partner_hello.phase is RunPhase.FINISH and own is RunPhase.TRAIN:
            raise Refused(RefusalCode.WRONG_PHASE, "still training")
        return self.partner_hello.phase

    def check_answer(self, answer: Hello, own: Hello) -> None:
        """Raise Refused or PeerMisbehaved unless this is the partner's answer to our Hello."""
        check_hello(answer, self.membership.terms, own.opening.sender, self.partner, self.now_s, own_hello=own)


def has_ended(hello: Hello, membership: Membership) -> bool:
    """Return whether the sender of a Hello has reached the end of the run, in either phase."""
    return hello.phase is RunPhase.FINISH or hello.global_step >= membership.total_steps


@dataclass(frozen=True, slots=True)
class Pairing:
    """What two Hellos fix for both sides."""

    meeting_id: bytes  # 16 bytes; identifies the meeting on the wire and in both journals
    seed: int  # of the codec
    phase: RunPhase  # an ordinary outer step, or the last averaging


def pairing(initiator: Hello, responder: Hello) -> Pairing:
    """Derive the meeting's id and seed from the run, the fragment and both nonces."""
    fragment = initiator.fragment.to_bytes(4, "little")
    names = b"gossamer-meeting" + initiator.opening.run_id + fragment + initiator.opening.nonce + responder.opening.nonce
    meeting_id = hashlib.sha256(names).digest()[:16]
    seed = int.from_bytes(hashlib.sha256(meeting_id + b"seed").digest()[:8], "little") & (2**63 - 1)
    return Pairing(meeting_id, seed, initiator.phase)


class Role(Enum):
    """Which side of the meeting this is."""

    INITIATOR = "initiator"  # connects, sends the first Hello, and decides
    RESPONDER = "responder"


class MeetingState(Enum):
    """The state of one side of a meeting."""

    OPENING = auto()  # own trainer snapshots the fragment
    CONNECTING = auto()  # a stream to the partner is being opened (initiator only)
    GREETING = auto()  # own Hello is sent (initiator only)
    PREPARING = auto()  # own trainer forms the message
    SKETCHING = auto()  # own sketch is sent, the partner's is incomplete
    ENCODING = auto()  # own trainer encodes against the partner's sketch
    COMMITTING = auto()  # own commitment is sent, the partner's is missing
    EXCHANGING = auto()  # own payload is sent, the partner's is incomplete
    CHECKING = auto()  # own trainer decodes and checks the partner's payload
    AWAITING_DECISION = auto()  # own verdict is known; the initiator waits for the partner's verdict, the responder for the decision
    IN_DOUBT = auto()  # the stream broke before the decision arrived (responder only)
    RECORDING = auto()  # the meeting counts; its journal record is being written
    APPLYING = auto()  # own trainer takes the outer step
    CONFIRMING = auto()  # the outer step is taken; the initiator waits for Committed
    OVER = auto()


DECIDED = (MeetingState.RECORDING, MeetingState.APPLYING, MeetingState.CONFIRMING)
TRAINERS_TURN = (MeetingState.OPENING, MeetingState.PREPARING, MeetingState.ENCODING, MeetingState.CHECKING)
UNANNOUNCED = (MeetingState.OPENING, MeetingState.CONNECTING)  # on the initiator's side: the partner does not know of the meeting


class Timer(Enum):
    """How long a side waits before DeadlinePassed, and for what; `Meeting.seconds` gives the time."""

    TRAINER = "the run's deadline"
    CONNECT = "15 s, or 5 s for a familiar partner"
    SILENCE = "a silence"  # a third of the run's deadline; less for a partner whose meetings are short
    CHUNK = "a silence and the time of a chunk"
    SKETCH = "a silence and the time of the sketch"
    PAYLOAD = "a silence and the time of the payload"
    DOUBT = "20 s"
    SHORT_DOUBT = "two of the partner's timeouts, at most 20 s"
    CONFIRM = "5 s"


class MeetingOutcome(Enum):
    """How a meeting ended."""

    COMPLETED = auto()  # it counts
    BUSY = auto()  # one of the two is in another meeting
    REFUSED = auto()  # by the partner, or its terms by us
    GATED = auto()  # the partner's message failed our merge gate
    MISBEHAVED = auto()  # the partner violated the protocol
    FAILED = auto()  # because of the network or the partner
    ABANDONED = auto()  # for a reason on our side: leaving, trainer or disk failed
