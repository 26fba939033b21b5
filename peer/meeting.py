"""One meeting as a state machine: events in, commands out; no I/O, no clock, no tensors.

Theory of operation. Both sides run the same machine; they differ in who greets first and who decides. A side walks through the stages
below, and each stage has one thing it waits for from its own trainer or from its partner. The partner may be ahead: its frames are
taken in as they come, in the only legal order, and `_advance` acts as soon as both halves of a stage are there.

    OPENING -> GREETING -> PREPARING -> SKETCHING -> ENCODING -> COMMITTING -> EXCHANGING -> CHECKING -> JUDGING -> APPLYING -> OVER
                                      (sketching, encoding: only where the codec has a sketch)            \\-> IN_DOUBT -/

The initiator decides: once it has the responder's verdict and its own the decision is journaled, told, and applied. Before that point
every failure drops the meeting on both sides. A responder whose stream breaks between its verdict and the decision is IN_DOUBT and asks
again (`Resolve`); what cannot be learnt before the deadline did not happen. So a side ends in the state before the meeting or after it,
never between; only a decision that no retry could deliver counts for one side alone (the two generals' last message).

Ideas from h11 (events, table, whose fault) and dask's worker state machine (commands, the story in the error).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import Enum, auto

from peer import requests as ask
from peer.meeting_events import (
    AskAgain,
    Command,
    DeadlinePassed,
    Drop,
    Event,
    Finish,
    Greeting,
    Journal,
    MeetingOver,
    PartnerBroke,
    PartnerGone,
    PartnerSent,
    Resolved,
    Send,
    SendPart,
    Started,
    Stopped,
    Store,
    Tell,
    TrainerAnswered,
    TrainerGone,
)
from peer.partner_side import PartnerSide
from protocol.errors import BadMessage, PeerMisbehaved
from protocol.messages import (
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
    RefusalCode,
    Refused,
    Verdict,
)


class Stage(Enum):
    """Where a side of a meeting stands."""

    OPENING = auto()  # own trainer snapshots the fragment
    GREETING = auto()  # own Hello is out (initiator only)
    PREPARING = auto()  # own trainer forms the message
    SKETCHING = auto()  # own sketch is out, the partner's is not complete
    ENCODING = auto()  # own trainer encodes against the partner's sketch
    COMMITTING = auto()  # own commitment is out, the partner's is not here
    EXCHANGING = auto()  # own payload is out, the partner's is not complete
    CHECKING = auto()  # own trainer decodes and judges
    JUDGING = auto()  # own verdict is known; the other side's, or the decision, is not
    IN_DOUBT = auto()  # responder only: the stream broke before the decision came
    APPLYING = auto()  # it counts; own trainer takes the outer step
    OVER = auto()


class InvalidTransition(AssertionError):
    """An event that this machine cannot meet in its stage: our own bug. Carries the story so far."""


class Meeting:
    """One side of one meeting.

    `number` is the trainer link's name for it. Feed `handle` every event, in order, and carry out what it returns, in order, before the
    next event. Not thread-safe; holds no resources.
    """

    def __init__(self, number: int, greeting: Greeting) -> None:
        self.number = number
        self.stage = Stage.OPENING
        self.meeting_id = b""
        self.outcome: Finish | None = None
        self._greeting = greeting
        self._partner = PartnerSide(greeting.terms.fragments[greeting.fragment])
        self._opened: ask.Opened | None = None
        self._own_failed = b""
        self._story: list[str] = []

    @property
    def initiates(self) -> bool:
        """Whether this side greets first and decides."""
        return self._greeting.partner_hello is None

    @property
    def fragment(self) -> int:
        """The fragment that is exchanged."""
        return self._greeting.fragment

    @property
    def partner_hello(self) -> Hello | None:
        """The partner's verified Hello, once it is here."""
        return self._partner.hello

    def handle(self, event: Event) -> list[Command]:
        """Take in one event and return what must be done now, in order.

        A partner that misbehaves ends the meeting with an outcome, not with an exception. Raises InvalidTransition on our own bugs only.
        """
        if self.stage is Stage.OVER:
            return []
        self._story.append(f"{self.stage.name} {type(event).__name__}")
        try:
            return self._handle(event)
        except Refused as refusal:
            return self._end(MeetingOver.REFUSED, str(refusal), say=Refusal(refusal.code, str(refusal)[:200]))
        except PeerMisbehaved as error:
            return self._end(MeetingOver.MISBEHAVED, str(error), say=Refusal(RefusalCode.BAD_MESSAGE, str(error)[:200]))

    def _handle(self, event: Event) -> list[Command]:
        match event:
            case Started():
                return [Tell(ask.Open(self.number, self._greeting.fragment))]
            case TrainerAnswered(reply):
                return self._on_trainer(reply)
            case PartnerSent(message):
                return self._on_message(message)
            case PartnerGone():
                return self._on_partner_gone()
            case PartnerBroke(error):
                raise error
            case Resolved(outcome):
                return self._on_resolved(outcome)
            case DeadlinePassed():
                return self._on_deadline()
            case TrainerGone():
                return self._end(MeetingOver.FAILED, "the trainer went away", say=Refusal(RefusalCode.NOT_READY, "trainer restarting"))
            case Stopped(reason):
                return self._on_stopped(reason)

    # ------------------------------------------------------------------ own trainer

    def _on_trainer(self, reply: ask.Reply) -> list[Command]:
        match self.stage, reply:
            case Stage.OPENING, ask.Opened():
                self._opened = reply
                return self._greet(reply)
            case Stage.OPENING, ask.Unavailable(reason=reason):
                return self._end(MeetingOver.BUSY, reason, say=Refusal(RefusalCode.BUSY, reason))
            case Stage.PREPARING, ask.SketchReady():
                self.stage = Stage.SKETCHING
                return [SendPart(Part.SKETCH), *self._advance()]
            case ((Stage.PREPARING | Stage.ENCODING), ask.PayloadReady(sha256=digest)):
                self.stage = Stage.COMMITTING
                own = Commitment(self.meeting_id, bytes.fromhex(digest), b"").signed(self._greeting.identity)
                return [Send(own), *self._advance()]
            case Stage.CHECKING, ask.Checked():
                return self._on_checked(reply)
            case Stage.APPLYING, ask.Applied():
                return self._end(MeetingOver.COMPLETED, "")
            case _, ask.Unavailable(reason=reason):
                return self._end(MeetingOver.FAILED, reason, say=Refusal(RefusalCode.NOT_READY, reason))
        raise InvalidTransition(f"{type(reply).__name__} in {self.stage.name}; story: {self._story}")

    def _greet(self, opened: ask.Opened) -> list[Command]:
        hello = self._greeting.own_hello(opened.tokens, opened.clock_steps, opened.stage)
        if self.initiates:
            self.stage = Stage.GREETING
            return [Send(hello)]
        partner_hello = self._greeting.partner_hello
        assert partner_hello is not None
        return [Send(hello), *self._met(partner_hello, initiator=partner_hello, responder=hello)]

    def _on_checked(self, checked: ask.Checked) -> list[Command]:
        if not checked.accepted:
            return self._end(MeetingOver.GATED, checked.reason, say=Refusal(RefusalCode.GATE, checked.reason[:200]))
        self._own_failed = bytes.fromhex(checked.failed_blocks)
        self.stage = Stage.JUDGING
        if self.initiates:
            return self._advance()
        return [Send(Verdict(self.meeting_id, self._own_failed))]

    # ------------------------------------------------------------------ partner

    def _on_message(self, message: Message) -> list[Command]:
        if isinstance(message, Refusal):
            over = MeetingOver.BUSY if message.code is RefusalCode.BUSY else MeetingOver.REFUSED
            return self._end(over, f"{message.code.name}: {message.detail}", refusal=message.code)
        handlers: dict[type, Callable[..., list[Command]]] = {
            Hello: self._on_hello,
            Chunk: self._on_chunk,
            Commitment: self._on_commitment,
            Verdict: self._on_verdict,
            Commit: self._on_commit,
            Committed: self._on_committed,
        }
        handler = handlers.get(type(message))
        if handler is None:
            raise BadMessage(f"{type(message).__name__} does not belong in a meeting")
        return handler(message)

    def _on_hello(self, hello: Hello) -> list[Command]:
        if self.stage is not Stage.GREETING or self._partner.hello is not None:
            raise BadMessage("a second Hello")
        assert self._opened is not None
        own = self._greeting.check_reply(hello, self._opened)
        return self._met(hello, initiator=own, responder=hello)

    def _met(self, partner: Hello, *, initiator: Hello, responder: Hello) -> list[Command]:
        self._partner.hello = partner
        fragment = self._greeting.fragment.to_bytes(4, "little")
        names = b"gossamer-meeting" + self._greeting.terms.run_id + fragment + initiator.nonce + responder.nonce
        self.meeting_id = hashlib.sha256(names).digest()[:16]
        self.stage = Stage.PREPARING
        seed = int.from_bytes(hashlib.sha256(self.meeting_id + b"seed").digest()[:8], "little") & (2**63 - 1)
        stage = self._greeting.stage_of(initiator)
        return [Tell(ask.Prepare(self.number, partner.tokens, partner.clock_steps, seed, stage))]

    def _on_chunk(self, chunk: Chunk) -> list[Command]:
        self._partner.take_chunk(chunk)
        return [Store(chunk.part, chunk.data), *self._advance()]

    def _on_commitment(self, commitment: Commitment) -> list[Command]:
        self._partner.take_commitment(commitment, self.meeting_id)
        return self._advance()

    def _on_verdict(self, verdict: Verdict) -> list[Command]:
        if not self.initiates:
            raise BadMessage("a verdict from the side that decides")
        self._partner.take_verdict(verdict, self.meeting_id)
        return self._advance()

    def _on_commit(self, commit: Commit) -> list[Command]:
        if self.initiates or self.stage is not Stage.JUDGING or commit.meeting_id != self.meeting_id:
            raise BadMessage("a Commit out of turn")
        return [*self._record(commit.failed_blocks), Send(Committed(self.meeting_id)), *self._apply(commit.failed_blocks)]

    def _on_committed(self, committed: Committed) -> list[Command]:
        if not self.initiates or self.stage is not Stage.APPLYING or committed.meeting_id != self.meeting_id:
            raise BadMessage("a Committed out of turn")
        return []

    # ------------------------------------------------------------------ both halves there?

    def _advance(self) -> list[Command]:
        partner = self._partner
        if self.stage is Stage.SKETCHING and partner.has_sketch:
            self.stage = Stage.ENCODING
            return [Tell(ask.Encode(self.number))]
        if self.stage is Stage.COMMITTING and partner.commitment is not None:
            self.stage = Stage.EXCHANGING
            return [SendPart(Part.PAYLOAD), *self._advance()]
        if self.stage is Stage.EXCHANGING and partner.has_payload:
            self.stage = Stage.CHECKING
            return [Tell(ask.Check(self.number))]
        if self.stage is Stage.JUDGING and self.initiates and partner.verdict is not None:
            failed = _union(self._own_failed, partner.verdict.failed_blocks)
            return [*self._record(failed), Send(Commit(self.meeting_id, failed)), *self._apply(failed)]
        return []

    def _record(self, failed_blocks: bytes) -> list[Command]:
        self._partner.need_bitmap(failed_blocks)
        return [Journal(self.meeting_id, failed_blocks)]

    def _apply(self, failed_blocks: bytes) -> list[Command]:
        self.stage = Stage.APPLYING
        return [Tell(ask.Apply(self.number, self.meeting_id.hex(), failed_blocks.hex()))]

    # ------------------------------------------------------------------ endings

    def _on_partner_gone(self) -> list[Command]:
        if self.stage is Stage.APPLYING:
            return []
        if self.stage is Stage.JUDGING and not self.initiates:
            return self._doubt()
        if self.stage is Stage.IN_DOUBT:
            return []
        return self._end(MeetingOver.FAILED, "the partner's stream ended")

    def _doubt(self) -> list[Command]:
        self.stage = Stage.IN_DOUBT
        return [AskAgain(self.meeting_id)]

    def _on_resolved(self, outcome: Outcome) -> list[Command]:
        if self.stage is not Stage.IN_DOUBT or outcome.meeting_id != self.meeting_id:
            return []
        if outcome.decision is Decision.COMMITTED:
            return [*self._record(outcome.failed_blocks), *self._apply(outcome.failed_blocks)]
        return self._end(MeetingOver.FAILED, "the stream broke before the decision, which was not to commit")

    def _on_deadline(self) -> list[Command]:
        if self.stage is Stage.APPLYING:
            return []
        if self.stage is Stage.JUDGING and not self.initiates:
            return self._doubt()
        return self._end(MeetingOver.FAILED, f"the deadline passed while {self.stage.name.lower()}", say=Refusal(RefusalCode.TOO_SLOW, ""))

    def _on_stopped(self, reason: str) -> list[Command]:
        if self.stage in (Stage.APPLYING, Stage.IN_DOUBT) or (self.stage is Stage.JUDGING and not self.initiates):
            return []  # it may count already: let it end by itself, or by its deadline
        return self._end(MeetingOver.FAILED, reason, say=Refusal(RefusalCode.LEAVING, reason[:200]))

    def _end(self, over: MeetingOver, reason: str, *, say: Refusal | None = None, refusal: RefusalCode | None = None) -> list[Command]:
        commands: list[Command] = []
        if say is not None:
            commands.append(Send(say))
        if over is not MeetingOver.COMPLETED:
            commands.append(Drop())
        self.stage = Stage.OVER
        self.outcome = Finish(over, reason, refusal)
        return [*commands, self.outcome]


def _union(first: bytes, second: bytes) -> bytes:
    """Unite two bitmaps, either of which may be empty."""
    if not first or not second:
        return first or second
    return bytes(a | b for a, b in zip(first, second, strict=True))
