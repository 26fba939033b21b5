"""The actions of one side of a meeting; the table in machine.py defines at which transition each is taken.

Each action returns commands; one that ends the meeting returns Finish last. An action raises Refused or PeerMisbehaved if the partner is to
blame, and has then changed nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from gossamer.peer.link.messages import Apply, Check, Checked, Encode, Open, Opened, PayloadReady, Prepare, SketchReady, Unavailable
from gossamer.peer.meeting import commands, events
from gossamer.peer.meeting.commands import Command
from gossamer.peer.meeting.interface import TRAINERS_TURN, UNANNOUNCED, Greeting, MeetingOutcome, MeetingState, Pairing, Role, pairing
from gossamer.protocol.errors import BadMessage, RefusalCode
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import CHUNK_BYTES, REFUSAL_DETAIL_CHARS
from gossamer.protocol.messages.messages import (
    Chunk,
    Commit,
    Commitment,
    Committed,
    Hello,
    Outcome,
    Part,
    Refusal,
    RunPhase,
    Verdict,
    exchange_digest,
)
from gossamer.protocol.messages.terms import FragmentTerms

NOT_CONFIRMED = "the meeting counts here; the partner has not confirmed it"


class Actions:
    """One side of one meeting: what it knows, its actions, and the guards of its transitions.

    `number` identifies the meeting on the trainer link.
    """

    def __init__(self, number: int, greeting: Greeting) -> None:
        self.number = number
        self.greeting = greeting
        self.state = MeetingState.OPENING
        self.own_hello: Hello | None = None  # once it is signed
        self.pairing = Pairing(b"", 0, RunPhase.TRAIN)  # once both Hellos are known
        self._partner = PartnerSide(greeting.fragment_terms)
        self._own_failed = b""  # bitmap of the blocks that failed here
        self._failed = b""  # once it is decided: bitmap of the blocks that failed on either side
        self._is_confirmed = self.role is Role.RESPONDER  # only the initiator waits for Committed
        self._partner_is_done = False  # once it is decided: the partner sends nothing more
        self.checked: Checked | None = None  # own trainer's judgement of the partner's payload, once it is there

    @property
    def role(self) -> Role:
        """Which side of the meeting this is."""
        return Role.INITIATOR if self.greeting.partner_hello is None else Role.RESPONDER

    @property
    def initiates(self) -> bool:
        """Whether this side sends the first Hello and decides."""
        return self.role is Role.INITIATOR

    @property
    def is_unannounced(self) -> bool:
        """Whether the partner does not know of the meeting yet."""
        return self.initiates and self.state in UNANNOUNCED

    @property
    def fragment(self) -> int:
        """The fragment that is exchanged."""
        return self.greeting.fragment

    @property
    def partner(self) -> PeerId:
        """The other side."""
        return self.greeting.partner

    @property
    def partner_hello(self) -> Hello | None:
        """The partner's verified Hello, once it has arrived."""
        return self._partner.hello or self.greeting.partner_hello

    # ------------------------------------------------------------------ actions: greeting

    def open(self, _: object) -> list[Command]:
        """Have own trainer snapshot the fragment."""
        return [commands.AskTrainer(Open(self.number, self.fragment))]

    def connect(self, opened: Opened) -> list[Command]:
        """Sign the Hello and open a stream to the partner."""
        self.own_hello = self.greeting.hello(opened)
        return [commands.Connect()]

    def greet(self, _: object) -> list[Command]:
        """Send the Hello."""
        assert self.own_hello is not None
        return [commands.Send(self.own_hello)]

    def take_answer(self, hello: Hello) -> list[Command]:
        """Check the partner's Hello and have own trainer form its message."""
        assert self.own_hello is not None
        self.greeting.check_answer(hello, self.own_hello)
        return self._pair(hello, pairing(self.own_hello, hello))

    def answer(self, opened: Opened) -> list[Command]:
        """Send the Hello and have own trainer form its message."""
        self.own_hello, first = self.greeting.hello(opened), self.greeting.partner_hello
        assert first is not None
        return [commands.Send(self.own_hello), *self._pair(first, pairing(first, self.own_hello))]

    def _pair(self, partner: Hello, pair: Pairing) -> list[Command]:
        assert self.own_hello is not None
        self._partner.hello, self.pairing = partner, pair
        tokens = self.greeting.trust.counted_tokens(partner.tokens, self.own_hello.tokens)
        return [commands.AskTrainer(Prepare(self.number, tokens, partner.global_step, pair.seed, pair.phase))]

    # ------------------------------------------------------------------ actions: exchange

    def send_sketch(self, ready: SketchReady) -> list[Command]:
        """Send the sketch."""
        self._partner.our_sketch = bytes.fromhex(ready.sha256)
        return [commands.SendPart(Part.SKETCH)]

    def encode(self, _: object) -> list[Command]:
        """Have own trainer encode against both sketches."""
        return [commands.AskTrainer(Encode(self.number))]

    def commit_to_payload(self, ready: PayloadReady) -> list[Command]:
        """Sign the hash of both sketches and our payload, and send it.

        A payload leaves only after the partner's commitment is here, so neither side can choose its payload after it saw the other's.
        """
        digest = self._partner.digest_of_ours(bytes.fromhex(ready.sha256))
        return [commands.Send(Commitment(self.pairing.meeting_id, digest).signed(self.greeting.membership.identity))]

    def send_payload(self, _: object) -> list[Command]:
        """Send the payload."""
        return [commands.SendPart(Part.PAYLOAD)]

    def check(self, _: object) -> list[Command]:
        """Have own trainer decode and check the partner's payload."""
        trust = self.greeting.trust
        most_part = 1.0 if self.pairing.phase is RunPhase.FINISH else trust.most_part  # in the end both take their mean
        return [commands.AskTrainer(Check(self.number, trust.must_probe, trust.share, most_part, self.greeting.place))]

    def store(self, chunk: Chunk) -> list[Command]:
        """Store the bytes."""
        self._partner.take_chunk(chunk)
        return [commands.Store(chunk.part, chunk.data)]

    def take_commitment(self, commitment: Commitment) -> list[Command]:
        """Keep the partner's commitment."""
        self._partner.take_commitment(commitment, self.pairing.meeting_id)
        return []

    def take_verdict(self, verdict: Verdict) -> list[Command]:
        """Keep the partner's verdict."""
        self._partner.take_verdict(verdict, self.pairing.meeting_id)
        return []

    def give_verdict(self, checked: Checked) -> list[Command]:
        """Keep the own verdict; a responder sends it."""
        self.checked, self._own_failed = checked, bytes.fromhex(checked.failed_blocks)
        return [] if self.initiates else [commands.Send(Verdict(self.pairing.meeting_id, self._own_failed))]

    # ------------------------------------------------------------------ actions: decision and doubt

    def decide(self, _: object) -> list[Command]:
        """Write the decision to the journal."""
        assert self._partner.verdict is not None
        return self._record(union(self._own_failed, self._partner.verdict.failed_blocks))

    def take_decision(self, decision: Commit | events.Resolved) -> list[Command]:
        """Write the partner's decision to the journal."""
        outcome = decision.outcome if isinstance(decision, events.Resolved) else decision
        self._need_this_meeting(outcome)
        return self._record(outcome.failed_blocks)

    def _record(self, failed_blocks: bytes) -> list[Command]:
        self._partner.need_bitmap(failed_blocks, self._own_failed)
        self._failed = failed_blocks
        return [commands.WriteJournal(self.pairing.meeting_id, failed_blocks)]

    def ask_decision(self, _: object) -> list[Command]:
        """Ask the partner for its decision on new streams."""
        return [commands.AskDecision(self.pairing.meeting_id)]

    def end_dropped(self, resolved: events.Resolved) -> list[Command]:
        """End as FAILED: the initiator dropped the meeting."""
        self._need_this_meeting(resolved.outcome)
        return self.end(MeetingOutcome.FAILED, "the stream broke, and the initiator had decided to drop the meeting")

    def give_up_asking(self, _: object) -> list[Command]:
        """End as FAILED: the decision cannot be learnt."""
        return self.end(MeetingOutcome.FAILED, "the stream broke before the decision, and the partner does not answer")

    def _need_this_meeting(self, decision: Commit | Outcome) -> None:
        if decision.meeting_id != self.pairing.meeting_id:
            raise BadMessage("the decision of another meeting")

    # ------------------------------------------------------------------ actions: ends before the decision

    def end_busy(self, unavailable: Unavailable) -> list[Command]:
        """End as BUSY: own trainer is in another meeting."""
        return self.end(MeetingOutcome.BUSY, unavailable.reason, RefusalCode.BUSY, unavailable.reason)

    def abandon(self, unavailable: Unavailable) -> list[Command]:
        """End as ABANDONED: own trainer cannot go on."""
        return self.end(MeetingOutcome.ABANDONED, unavailable.reason, RefusalCode.NOT_READY, unavailable.reason)

    def reject(self, checked: Checked) -> list[Command]:
        """End as GATED: refuse the partner's payload."""
        self.checked = checked
        return self.end(MeetingOutcome.GATED, checked.reason, RefusalCode.GATE, checked.reason)

    def take_refusal(self, refusal: Refusal) -> list[Command]:
        """End as BUSY or REFUSED, by the partner's code."""
        outcome = MeetingOutcome.BUSY if refusal.code is RefusalCode.BUSY else MeetingOutcome.REFUSED
        return self.end(outcome, f"{refusal.code.name}: {refusal.detail}", refusal=refusal.code)

    def blame_order(self, message: object) -> list[Command]:
        """End as MISBEHAVED: the message is out of turn."""
        raise BadMessage(f"a {type(message).__name__} out of turn")

    def blame_frame(self, malformed: events.PartnerMalformed) -> list[Command]:
        """End as MISBEHAVED: the frame is not a message."""
        raise malformed.error

    def lose_partner(self, _: object) -> list[Command]:
        """End as FAILED: the stream ended."""
        return self.end(MeetingOutcome.FAILED, "the partner cannot be reached" if self.is_unannounced else "the partner's stream ended")

    def lose_trainer(self, _: object) -> list[Command]:
        """End as ABANDONED: own trainer has exited."""
        return self.end(MeetingOutcome.ABANDONED, "the trainer went away", RefusalCode.NOT_READY, "trainer restarting")

    def time_out(self, _: object) -> list[Command]:
        """End as ABANDONED if own trainer is late, as FAILED if the partner is."""
        outcome = MeetingOutcome.ABANDONED if self.state in TRAINERS_TURN else MeetingOutcome.FAILED
        return self.end(outcome, f"the deadline passed while {self.state.name.lower()}", RefusalCode.TOO_SLOW)

    def stop(self, stopped: events.Stopped) -> list[Command]:
        """End as BUSY or ABANDONED, by our own code."""
        outcome = MeetingOutcome.BUSY if stopped.code is RefusalCode.BUSY else MeetingOutcome.ABANDONED
        return self.end(outcome, stopped.reason, stopped.code, stopped.reason)

    def end(
        self, outcome: MeetingOutcome, reason: str, send: RefusalCode | None = None, detail: str = "", *, refusal: RefusalCode | None = None
    ) -> list[Command]:
        """End without an outer step here. `send`: the code for the partner, if it knows of the meeting."""
        refusals: list[Command] = []
        if send is not None and not self.is_unannounced:
            refusals.append(commands.Send(Refusal(send, detail[:REFUSAL_DETAIL_CHARS])))
        return [*refusals, commands.DropMeeting(), commands.Finish(outcome, reason, refusal)]

    # ------------------------------------------------------------------ actions: after the decision

    def apply(self, _: object) -> list[Command]:
        """Have own trainer take the outer step, then send Commit or Committed."""
        # The trainer comes before the partner: if this peer dies in between, a partner that asks learns the decision from the journal. A
        # responder applies without a journal too: the meeting counts for the initiator, whose journal is the one that is asked.
        meeting_id = self.pairing.meeting_id
        apply = Apply(self.number, meeting_id.hex(), self._failed.hex())
        return [commands.AskTrainer(apply), commands.Send(Commit(meeting_id, self._failed) if self.initiates else Committed(meeting_id))]

    def drop_unrecorded(self, failure: events.NotJournaled) -> list[Command]:
        """End as ABANDONED: without a journal record there is no decision."""
        reason = f"the decision cannot be recorded: {failure.reason}"
        return self.end(MeetingOutcome.ABANDONED, reason, RefusalCode.NOT_READY, "cannot record the decision")

    def lose_step(self, event: Unavailable | events.TrainerGone) -> list[Command]:
        """End as ABANDONED: the outer step is lost on this side."""
        reason = event.reason if isinstance(event, Unavailable) else "the trainer went away"
        return self.end(MeetingOutcome.ABANDONED, f"it counts for the partner, but is lost here: {reason}")

    def note_confirmed(self, _: object) -> list[Command]:
        """Note that the partner has recorded the decision."""
        self._is_confirmed = True
        return []

    def note_partner_done(self, _: object) -> list[Command]:
        """Note that the partner sends nothing more."""
        self._partner_is_done = True
        return []

    def complete(self, _: object) -> list[Command]:
        """End as COMPLETED."""
        return [commands.Finish(MeetingOutcome.COMPLETED, "" if self._is_confirmed else NOT_CONFIRMED)]

    def ignore(self, _: object) -> list[Command]:
        """Do nothing."""
        return []

    # ------------------------------------------------------------------ guards

    def has_sketch(self, _: object) -> bool:
        """the partner's sketch is complete"""
        return self._partner.has_sketch

    def has_commitment(self, _: object) -> bool:
        """the partner's commitment is here"""
        return self._partner.commitment is not None

    def has_payload(self, _: object) -> bool:
        """the partner's payload is complete"""
        return self._partner.has_payload

    def has_verdict(self, _: object) -> bool:
        """the partner's verdict is here"""
        return self._partner.verdict is not None

    def is_accepted(self, checked: Checked) -> bool:
        """accepted"""
        return checked.accepted

    def is_whole(self, chunk: Chunk) -> bool:
        """of full size"""  # so that a partner that sends single bytes gains no time
        return len(chunk.data) == CHUNK_BYTES

    def is_commit(self, resolved: events.Resolved) -> bool:
        """committed"""
        return resolved.outcome.is_committed

    def is_of_this_meeting(self, committed: Committed) -> bool:
        """of this meeting"""
        return committed.meeting_id == self.pairing.meeting_id

    def partner_is_done(self, _: object) -> bool:
        """the partner has confirmed, or sends nothing more"""
        return self._is_confirmed or self._partner_is_done


@dataclass(slots=True)
class PartnerSide:
    """What the partner has sent: Hello, sketch, commitment, payload, verdict; each once, in this order, and of the size in the manifest."""

    terms: FragmentTerms
    hello: Hello | None = None
    commitment: Commitment | None = None
    verdict: Verdict | None = None
    our_sketch: bytes = hashlib.sha256().digest()
    _sketch_bytes: int = 0
    _payload_bytes: int = 0
    _sketch: hashlib._Hash = field(default_factory=hashlib.sha256)
    _payload: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def has_sketch(self) -> bool:
        """Whether the whole sketch is here (or the codec has none)."""
        return self._sketch_bytes == self.terms.sketch_bytes

    @property
    def has_payload(self) -> bool:
        """Whether the whole payload is here and matches the commitment."""
        return self._payload_bytes == self.terms.payload_bytes

    def take_chunk(self, chunk: Chunk) -> None:
        """Count a chunk of the sketch (before the commitment) or of the payload (after it)."""
        if self.hello is None:
            raise BadMessage("bytes before a Hello")
        if chunk.part is Part.SKETCH and self.commitment is None:
            _need_next(chunk, self._sketch_bytes, self.terms.sketch_bytes)
            self._sketch_bytes += len(chunk.data)
            self._sketch.update(chunk.data)
        elif chunk.part is Part.PAYLOAD and self.commitment is not None:
            _need_next(chunk, self._payload_bytes, self.terms.payload_bytes)
            self._payload_bytes += len(chunk.data)
            self._payload.update(chunk.data)
            if self.has_payload and self._digest() != self.commitment.sha256:
                raise BadMessage("sketches and payload do not have the hash that was committed to")
        else:
            raise BadMessage(f"a chunk of the {chunk.part.name.lower()} out of turn")

    def digest_of_ours(self, payload: bytes) -> bytes:
        """Return the digest for our commitment: of a payload with this SHA-256 and of both sketches."""
        return exchange_digest(self.our_sketch, self._sketch.digest(), payload)

    def _digest(self) -> bytes:
        return exchange_digest(self._sketch.digest(), self.our_sketch, self._payload.digest())

    def take_commitment(self, commitment: Commitment, meeting_id: bytes) -> None:
        """Keep the commitment that the payload must match."""
        if self.hello is None or self.commitment is not None or not self.has_sketch:
            raise BadMessage("a commitment out of turn")
        if commitment.meeting_id != meeting_id:
            raise BadMessage("a commitment of another meeting")
        commitment.verify(self.hello.opening.sender)
        self.commitment = commitment

    def take_verdict(self, verdict: Verdict, meeting_id: bytes) -> None:
        """Keep the partner's verdict on our payload."""
        if self.commitment is None or not self.has_payload or self.verdict is not None:
            raise BadMessage("a verdict out of turn")
        if verdict.meeting_id != meeting_id:
            raise BadMessage("a verdict of another meeting")
        self.need_bitmap(verdict.failed_blocks)
        self.verdict = verdict

    def need_bitmap(self, failed_blocks: bytes, own: bytes = b"") -> None:
        """Raise BadMessage unless this can be a bitmap of this fragment's blocks, with every block of `own` (empty: none) in it."""
        if len(failed_blocks) not in (0, (self.terms.num_blocks + 7) // 8):
            raise BadMessage(f"a list of failed blocks of {len(failed_blocks)} bytes for {self.terms.num_blocks} blocks")
        if any(ours & ~theirs for ours, theirs in zip(own, failed_blocks or bytes(len(own)), strict=False)):
            raise BadMessage("a decision that leaves out blocks which failed here")


def union(first: bytes, second: bytes) -> bytes:
    """Unite two bitmaps of one fragment; an empty one stands for none."""
    if not first or not second:
        return first or second
    return bytes(a | b for a, b in zip(first, second, strict=True))


def _need_next(chunk: Chunk, done: int, limit: int) -> None:
    if chunk.offset != done or done + len(chunk.data) > limit:
        raise BadMessage(f"{len(chunk.data)} bytes of {chunk.part.name.lower()} at {chunk.offset}; {done} of {limit} are here")
