"""One meeting as a state machine: events in, commands out; no I/O, no clock, no tensors.

Theory of operation. Both sides run the same machine; they differ in who greets first and who decides. A side walks through the states
below, and each has one thing it waits for from its own trainer or from its partner. The partner may be ahead: its frames are taken in as
they come, in the only legal order (`PartnerSide`), and `_advance` acts as soon as both halves of a state are there.

    OPENING -> CONNECTING -> GREETING -> PREPARING -> SKETCHING -> ENCODING -> COMMITTING -> EXCHANGING -> CHECKING -> JUDGING -> ...
               (both on the initiator's side)         (only where the codec has a sketch)

    ... JUDGING -> RECORDING -> APPLYING -> CONFIRMING (initiator)
           |           ^
           +- IN_DOUBT-+ (responder)

Who calls asks its own trainer first, however long that takes, and connects when it can speak: a partner that is called hangs up on silence.
The initiator decides: once it has the responder's verdict and its own, the decision is journaled, applied and told (`DecidedMeeting`).
Before that point every failure drops the meeting on both sides. A responder that loses the stream between its verdict and the decision is
IN_DOUBT and asks again (`Resolve`); what cannot be learnt in time did not happen. After that point nothing that the partner does, or does
not do, changes anything: the meeting counts. So a side ends in the state before the meeting or after it, never between; only a decision
that no retry could deliver counts for one side alone (the two generals' last message), and the initiator, which waits for `Committed`,
says so.

Ideas from h11 (events, table, whose fault) and dask's worker state machine (commands, the story in the error).
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from dataclasses import dataclass, field

from gossamer.peer.link import messages
from gossamer.peer.meeting import words as on
from gossamer.peer.meeting.hello import Greeting, Pairing, pairing
from gossamer.peer.meeting.line import transfer_s
from gossamer.peer.meeting.words import DECIDED, TRAINERS_TURN, UNHEARD, Command, Finish, MeetingOutcome, MeetingState
from gossamer.protocol.errors import BadContents, BadMessage, PeerMisbehaved, RefusalCode, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import CHUNK_BYTES, REFUSAL_DETAIL_CHARS
from gossamer.protocol.messages.messages import (
    Chunk,
    Commit,
    Commitment,
    Committed,
    Decision,
    Hello,
    Message,
    Outcome,
    Part,
    Refusal,
    RunPhase,
    Verdict,
    exchange_digest,
)
from gossamer.protocol.messages.terms import FragmentTerms

CONNECT_S = 15.0
AGAIN_S = 5.0  # where a way has worked: while all wait for one that is gone, nobody meets
SILENCE_SHARE = 1 / 3  # of the deadline: so long a partner may say nothing, while its trainer works or bytes are on their way
DOUBT_S = 20.0  # how long a responder asks for a decision that it did not see, at most
DOUBT_PATIENCES = 2.0  # times its patience with a partner that has fallen silent, where that is less: whose stream ended may be restarting
STORY_EVENTS = 64
CONFIRM_S = 5.0  # how long an initiator that has applied waits for the partner to say that it has recorded the decision
NOT_CONFIRMED = "it counts here; whether the partner heard of it is not known"


class Meeting:
    """One side of one meeting.

    `number` is the trainer link's name for it. Feed `handle` every event, in order, and carry out what it returns, in order, before the
    next event. Not thread-safe; holds no resources.
    """

    def __init__(self, number: int, greeting: Greeting) -> None:
        self.number = number
        self.finish: Finish | None = None
        self.own_hello: Hello | None = None  # once it is signed
        self.pairing = Pairing(b"", 0, RunPhase.TRAIN)  # until both Hellos are there
        self.greeting = greeting
        self._deadline_s = greeting.membership.deadline_s
        self._partner = PartnerSide(greeting.fragment_terms)
        self._own_failed = b""  # bitmap
        self._state = MeetingState.OPENING
        self._decided: DecidedMeeting | None = None  # once it is decided
        self._story: deque[str] = deque(maxlen=STORY_EVENTS)

    @property
    def state(self) -> MeetingState:
        """Where this side stands."""
        return self._state if self._decided is None or self.finish is not None else self._decided.state

    @property
    def payload_bytes(self) -> int:
        """The size of each side's payload."""
        return self.greeting.fragment_terms.payload_bytes

    @property
    def initiates(self) -> bool:
        """Whether this side greets first and decides."""
        return self.greeting.partner_hello is None

    @property
    def is_unheard(self) -> bool:
        """Whether the partner does not know of it yet."""
        return self.initiates and self.state in UNHEARD

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
        """The partner's verified Hello, once it is here."""
        return self._partner.hello or self.greeting.partner_hello

    @property
    def is_decided(self) -> bool:
        """Whether it counts already."""
        return self.state in DECIDED

    def handle(self, event: on.Event) -> list[Command]:
        """Take in one event and return what must be done now, in order.

        A partner that misbehaves ends the meeting with an outcome, not with an exception. Raises InvalidTransition on our own bugs only.
        """
        if self.finish is not None:
            return []
        self._story.append(f"{self.state.name} {type(event).__name__}")
        try:
            commands = self._before_decision(event) if self._decided is None else self._decided.handle(event)
        except InvalidTransition as bug:
            bug.add_note(f"the story: {', '.join(self._story)}")
            raise
        if commands and isinstance(commands[-1], Finish):
            self.finish = commands[-1]
            self._state = MeetingState.OVER
        return commands

    def _before_decision(self, event: on.Event) -> list[Command]:
        try:
            return self._on_event(event)
        except Refused as refusal:
            return self._end(MeetingOutcome.REFUSED, str(refusal), refusal.code, refusal.detail)
        except PeerMisbehaved as error:
            return self._end(MeetingOutcome.MISBEHAVED, str(error), RefusalCode.BAD_MESSAGE, str(error))

    def _on_event(self, event: on.Event) -> list[Command]:
        match event:
            case on.Started() if self.state is MeetingState.OPENING:
                return [self._allow(), on.Tell(messages.Open(self.number, self.fragment))]
            case on.TrainerAnswered(reply):
                return self._on_trainer(reply)
            case on.Connected() if self.state is MeetingState.CONNECTING and self.own_hello is not None:
                self._state = MeetingState.GREETING
                return [on.Send(self.own_hello), self._allow()]
            case on.TrainerGone():
                return self._end(MeetingOutcome.ABANDONED, "the trainer went away", RefusalCode.NOT_READY, "trainer restarting")
            case on.PartnerSent(message):
                return self._on_message(message)
            case on.PartnerGone():
                return self._on_partner_gone()
            case on.PartnerBroke(error):
                raise error
            case on.Resolved(outcome) if self.state is MeetingState.IN_DOUBT:
                return self._on_resolved(outcome)
            case on.DeadlinePassed():
                return self._on_deadline()
            case on.Stopped(reason, code):
                ended = MeetingOutcome.BUSY if code is RefusalCode.BUSY else MeetingOutcome.ABANDONED
                return [] if self._awaits_decision else self._end(ended, reason, code, reason)
        raise InvalidTransition(f"{event} in {self.state.name}")

    @property
    def _awaits_decision(self) -> bool:
        """Whether it may count already without our knowing."""
        return self.state is MeetingState.IN_DOUBT or (self.state is MeetingState.JUDGING and not self.initiates)

    # ------------------------------------------------------------------ own trainer

    def _on_trainer(self, reply: messages.Reply) -> list[Command]:
        match self.state, reply:
            case MeetingState.OPENING, messages.Opened():
                return self._greet(reply)
            case MeetingState.OPENING, messages.Unavailable(reason=reason):
                return self._end(MeetingOutcome.BUSY, reason, RefusalCode.BUSY, reason)
            case ((MeetingState.PREPARING | MeetingState.ENCODING | MeetingState.CHECKING), messages.Unavailable(reason=reason)):
                return self._end(MeetingOutcome.ABANDONED, reason, RefusalCode.NOT_READY, reason)
            case MeetingState.PREPARING, messages.SketchReady(sha256=digest):
                self._state = MeetingState.SKETCHING
                self._partner.our_sketch = bytes.fromhex(digest)
                return [on.SendPart(Part.SKETCH), self._allow(CHUNK_BYTES), *self._advance()]
            case ((MeetingState.PREPARING | MeetingState.ENCODING), messages.PayloadReady(sha256=digest)):
                self._state = MeetingState.COMMITTING
                committed = self._partner.digest_of_ours(bytes.fromhex(digest))
                own = Commitment(self.pairing.meeting_id, committed).signed(self.greeting.membership.identity)
                return [on.Send(own), self._allow(self.greeting.fragment_terms.sketch_bytes), *self._advance()]  # ours may be on its way
            case MeetingState.CHECKING, messages.Checked(accepted=False, reason=reason):
                return self._end(MeetingOutcome.GATED, reason, RefusalCode.GATE, reason)
            case MeetingState.CHECKING, messages.Checked(failed_blocks=failed_blocks):
                self._own_failed = bytes.fromhex(failed_blocks)
                self._state = MeetingState.JUDGING
                said: list[Command] = [] if self.initiates else [on.Send(Verdict(self.pairing.meeting_id, self._own_failed))]
                return [*said, self._allow(self.payload_bytes), *self._advance()]  # ours may still be on its way
        raise InvalidTransition(f"{reply} in {self.state.name}")

    def _greet(self, opened: messages.Opened) -> list[Command]:
        self.own_hello = own = self.greeting.hello(opened)
        partner = self.greeting.partner_hello
        if partner is not None:
            return [on.Send(own), *self._pair(partner, pairing(partner, own))]
        self._state = MeetingState.CONNECTING
        return [on.Connect(), on.Allow(CONNECT_S if self.greeting.patience_s == math.inf else AGAIN_S)]

    # ------------------------------------------------------------------ partner

    def _on_message(self, message: Message) -> list[Command]:
        partner, meeting_id = self._partner, self.pairing.meeting_id
        match message:
            case Refusal():
                outcome = MeetingOutcome.BUSY if message.code is RefusalCode.BUSY else MeetingOutcome.REFUSED
                return self._end(outcome, f"{message.code.name}: {message.detail}", refusal=message.code)
            case Hello():
                return self._on_hello(message)
            case Chunk():
                partner.take_chunk(message)
                more = [self._allow(CHUNK_BYTES)] if len(message.data) == CHUNK_BYTES else []  # a drop now and then buys no time
                return [on.Store(message.part, message.data), *more, *self._advance()]
            case Commitment():
                partner.take_commitment(message, meeting_id)
                return self._advance()
            case Verdict() if self.initiates:
                partner.take_verdict(message, meeting_id)
                return self._advance()
            case Commit() if self._awaits_decision and message.meeting_id == meeting_id:
                return self._decide(message.failed_blocks)
        raise BadMessage(f"a {type(message).__name__} out of turn")

    def _on_hello(self, hello: Hello) -> list[Command]:
        own = self.own_hello
        if self.state is not MeetingState.GREETING or own is None:
            raise BadMessage("a second Hello")
        self.greeting.check_answer(hello, own)
        return self._pair(hello, pairing(own, hello))

    def _pair(self, partner: Hello, pair: Pairing) -> list[Command]:
        self._partner.hello = partner
        self.pairing = pair
        self._state = MeetingState.PREPARING
        prepare = messages.Prepare(self.number, partner.tokens, partner.clock_steps, pair.seed, pair.phase)
        return [self._allow(), on.Tell(prepare)]

    def _on_partner_gone(self) -> list[Command]:
        if self._awaits_decision:
            return self._doubt(DOUBT_S)
        return self._end(MeetingOutcome.FAILED, "the partner cannot be reached" if self.is_unheard else "the partner's stream ended")

    # ------------------------------------------------------------------ both halves there?

    def _advance(self) -> list[Command]:
        partner = self._partner
        if self.state is MeetingState.SKETCHING and partner.has_sketch:
            self._state = MeetingState.ENCODING
            return [self._allow(), on.Tell(messages.Encode(self.number))]
        if self.state is MeetingState.COMMITTING and partner.commitment is not None:
            self._state = MeetingState.EXCHANGING
            return [on.SendPart(Part.PAYLOAD), self._allow(CHUNK_BYTES), *self._advance()]
        if self.state is MeetingState.EXCHANGING and partner.has_payload:
            self._state = MeetingState.CHECKING
            return [self._allow(), on.Tell(messages.Check(self.number))]
        if self.state is MeetingState.JUDGING and self.initiates and partner.verdict is not None:
            return self._decide(union(self._own_failed, partner.verdict.failed_blocks))
        return []

    def _allow(self, num_bytes: int = 0) -> on.Allow:
        """Allow our own trainer the deadline where it is its turn, else the partner a silence, and the time that so many bytes may take."""
        if self.state in TRAINERS_TURN:
            return on.Allow(self._deadline_s)
        silence_s = SILENCE_SHARE * self._deadline_s + transfer_s(min(num_bytes, self.payload_bytes))
        return on.Allow(min(silence_s, self.greeting.patience_s))

    # ------------------------------------------------------------------ decision, doubt, end

    def _decide(self, failed_blocks: bytes) -> list[Command]:
        self._partner.need_bitmap(failed_blocks, self._own_failed)
        self._decided = DecidedMeeting(self.number, Commit(self.pairing.meeting_id, failed_blocks), self.initiates)
        return self._decided.begin()

    def _doubt(self, most_s: float) -> list[Command]:
        if self.state is MeetingState.IN_DOUBT:
            return []
        self._state = MeetingState.IN_DOUBT
        return [on.Allow(min(DOUBT_S, most_s)), on.AskAgain(self.pairing.meeting_id)]

    def _on_resolved(self, outcome: Outcome) -> list[Command]:
        if outcome.meeting_id != self.pairing.meeting_id:
            raise BadMessage("the outcome of another meeting")
        if outcome.decision is Decision.COMMITTED:
            return self._decide(outcome.failed_blocks)
        return self._end(MeetingOutcome.FAILED, "the stream broke before the decision, which was to drop it")

    def _on_deadline(self) -> list[Command]:
        if self.state is MeetingState.IN_DOUBT:
            return self._end(MeetingOutcome.FAILED, "the stream broke before the decision, and the partner cannot be asked")
        if self._awaits_decision:
            return self._doubt(DOUBT_PATIENCES * self.greeting.patience_s)
        outcome = MeetingOutcome.ABANDONED if self.state in TRAINERS_TURN else MeetingOutcome.FAILED
        return self._end(outcome, f"the deadline passed while {self.state.name.lower()}", RefusalCode.TOO_SLOW)

    def _end(
        self, outcome: MeetingOutcome, reason: str, say: RefusalCode | None = None, detail: str = "", *, refusal: RefusalCode | None = None
    ) -> list[Command]:
        """End before the decision. `say` is what the partner is told, if it has heard of us."""
        commands: list[Command] = [on.Forget(), Finish(outcome, reason, refusal)]
        if say is None or self.is_unheard:
            return commands
        return [on.Send(Refusal(say, detail[:REFUSAL_DETAIL_CHARS])), *commands]


class InvalidTransition(AssertionError):
    """An event that cannot happen in this state: our own bug. Carries the story so far."""


class DecidedMeeting:
    """A meeting from its decision to its end, on one side. `commit` is the decision, `number` the trainer link's name of the meeting."""

    def __init__(self, number: int, commit: Commit, initiates: bool) -> None:
        self.state = MeetingState.RECORDING
        self._number = number
        self._commit = commit
        self._initiates = initiates
        self._is_confirmed = not initiates  # a responder has nobody to hear from
        self._is_alone = False  # nothing more will come from the partner

    def begin(self) -> list[Command]:
        """Return what must be done first."""
        return [on.WriteDown(self._commit.meeting_id, self._commit.failed_blocks)]

    def handle(self, event: on.Event) -> list[Command]:
        """Take in one event and return what must be done now. Raises InvalidTransition on our own bugs only."""
        match event:
            case on.Journaled() if self.state is MeetingState.RECORDING:
                return self._apply()
            case on.NotJournaled(reason) if self.state is MeetingState.RECORDING:
                return self._not_journaled(reason)
            case on.TrainerAnswered(messages.Applied()) if self.state is MeetingState.APPLYING:
                return self._on_applied()
            case on.TrainerAnswered(messages.Unavailable(reason=reason)) if self.state is MeetingState.APPLYING:
                return self._lost(reason)
            case on.TrainerGone():
                return self._lost("the trainer went away") if self.state is MeetingState.APPLYING else []
            case on.PartnerSent(Committed(meeting_id)) if self._initiates and meeting_id == self._commit.meeting_id:
                self._is_confirmed = True
                return self._end_if_applied()
            case on.PartnerGone() | on.PartnerBroke():
                self._is_alone = True
                return self._end_if_applied()
            case on.PartnerSent() | on.DeadlinePassed() | on.Stopped():
                return self._end_if_applied()
            case on.Resolved():
                return []
        raise InvalidTransition(f"{event} in {self.state.name}")

    def _apply(self) -> list[Command]:
        """Own trainer before the partner: if we die in between, a partner that asks learns it from the journal."""
        self.state = MeetingState.APPLYING
        meeting_id = self._commit.meeting_id
        told = self._commit if self._initiates else Committed(meeting_id)
        return [on.Tell(messages.Apply(self._number, meeting_id.hex(), self._commit.failed_blocks.hex())), on.Send(told)]

    def _not_journaled(self, reason: str) -> list[Command]:
        if not self._initiates:
            return self._apply()  # it counts for the partner, whose journal is the one that is asked
        refusal = Refusal(RefusalCode.NOT_READY, "cannot record the decision")
        return [on.Send(refusal), on.Forget(), Finish(MeetingOutcome.ABANDONED, f"the decision cannot be recorded: {reason}")]

    def _on_applied(self) -> list[Command]:
        self.state = MeetingState.CONFIRMING
        if self._is_confirmed or self._is_alone:
            return self._end_if_applied()
        return [on.Allow(CONFIRM_S)]

    def _lost(self, reason: str) -> list[Command]:
        return [on.Forget(), Finish(MeetingOutcome.ABANDONED, f"it counts for the partner, but is lost here: {reason}")]

    def _end_if_applied(self) -> list[Command]:
        if self.state is not MeetingState.CONFIRMING:
            return []
        return [Finish(MeetingOutcome.COMPLETED, "" if self._is_confirmed else NOT_CONFIRMED)]


@dataclass(slots=True)
class PartnerSide:
    """Hello, sketch, commitment, payload, verdict: each once, in this order, of the sizes that the manifest implies."""

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
        """Whether the whole payload is here; it was checked against the commitment when its last byte came."""
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
                raise BadContents("sketches and payload do not have the hash that was committed to")
        else:
            raise BadMessage(f"a chunk of the {chunk.part.name.lower()} out of turn")

    def digest_of_ours(self, payload: bytes) -> bytes:
        """Return what our commitment names: a payload of this SHA-256, and the sketches by which it was coded."""
        return exchange_digest(self.our_sketch, self._sketch.digest(), payload)

    def _digest(self) -> bytes:
        return exchange_digest(self._sketch.digest(), self.our_sketch, self._payload.digest())

    def take_commitment(self, commitment: Commitment, meeting_id: bytes) -> None:
        """Hold the partner to the payload that it is going to send."""
        if self.hello is None or self.commitment is not None or not self.has_sketch:
            raise BadMessage("a commitment out of turn")
        if commitment.meeting_id != meeting_id:
            raise BadMessage("a commitment of another meeting")
        commitment.verify(self.hello.sender)
        self.commitment = commitment

    def take_verdict(self, verdict: Verdict, meeting_id: bytes) -> None:
        """Note that the partner accepts our payload."""
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
