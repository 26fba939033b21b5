"""One meeting as a state machine: events in, commands out; no I/O, no clock, no tensors.

Theory of operation. Both sides run the same machine; they differ in who greets first and who decides. A side walks through the stages
below, and each stage has one thing it waits for from its own trainer or from its partner. The partner may be ahead: its frames are
taken in as they come, in the only legal order, and `_advance` acts as soon as both halves of a stage are there.

    OPENING -> GREETING -> PREPARING -> SKETCHING -> ENCODING -> COMMITTING -> EXCHANGING -> CHECKING -> JUDGING -> RECORDING -> APPLYING
               (initiator)              (only where the codec has a sketch)                                |           ^            |
                                                                                        (responder) IN_DOUBT ----------+   CONFIRMING
                                                                                                                          (initiator)
The initiator decides: once it has the responder's verdict and its own, the decision is journaled, applied and told. Before that point
every failure drops the meeting on both sides. A responder that loses the stream between its verdict and the decision is IN_DOUBT and
asks again (`Resolve`); what cannot be learnt in time did not happen. After that point nothing that the partner does, or does not do,
changes anything: the meeting counts. So a side ends in the state before the meeting or after it, never between; only a decision that no
retry could deliver counts for one side alone (the two generals' last message), and the initiator, which waits for `Committed`, says so.

Ideas from h11 (events, table, whose fault) and dask's worker state machine (commands, the story in the error).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from peer import meeting_events as on
from peer import requests as ask
from peer.greeting import Greeting, Pairing, pairing
from peer.meeting_events import DECIDED, TRAINERS_TURN, Command, Finish, MeetingOver, Stage
from peer.partner_side import PartnerSide, union
from peer.settlement import InvalidTransition, Settlement
from protocol.errors import BadMessage, PeerMisbehaved
from protocol.identity import PeerId
from protocol.limits import REFUSAL_DETAIL_CHARS
from protocol.messages import (
    Chunk,
    Commit,
    Commitment,
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

GREETING_SHARE = 1 / 3  # of the deadline: a partner that says nothing at all leaves time for another
DOUBT_S = 20.0  # how long a responder asks for a decision that it did not see
STORY_EVENTS = 64


class Meeting:
    """One side of one meeting.

    `number` is the trainer link's name for it. Feed `handle` every event, in order, and carry out what it returns, in order, before the
    next event. Not thread-safe; holds no resources.
    """

    def __init__(self, number: int, greeting: Greeting) -> None:
        self.number = number
        self.outcome: Finish | None = None
        self.pairing = Pairing(b"", 0, ask.Stage.TRAIN)  # until both Hellos are there
        self._greeting = greeting
        self._deadline_s = greeting.membership.deadline_s
        self._partner = PartnerSide(greeting.fragment_terms)
        self._own_hello: Hello | None = None
        self._own_failed = b""  # bitmap
        self._stage = Stage.OPENING
        self._settlement: Settlement | None = None  # once it is decided
        self._story: deque[str] = deque(maxlen=STORY_EVENTS)

    @property
    def stage(self) -> Stage:
        """Where this side stands."""
        return self._stage if self._settlement is None or self.outcome is not None else self._settlement.stage

    @property
    def initiates(self) -> bool:
        """Whether this side greets first and decides."""
        return self._greeting.partner_hello is None

    @property
    def fragment(self) -> int:
        """The fragment that is exchanged."""
        return self._greeting.fragment

    @property
    def partner(self) -> PeerId:
        """The other side."""
        return self._greeting.partner

    @property
    def partner_hello(self) -> Hello | None:
        """The partner's verified Hello, once it is here."""
        return self._partner.hello or self._greeting.partner_hello

    @property
    def is_decided(self) -> bool:
        """Whether it counts already."""
        return self.stage in DECIDED

    def handle(self, event: on.Event) -> list[Command]:
        """Take in one event and return what must be done now, in order.

        A partner that misbehaves ends the meeting with an outcome, not with an exception. Raises InvalidTransition on our own bugs only.
        """
        if self.outcome is not None:
            return []
        self._story.append(f"{self.stage.name} {type(event).__name__}")
        try:
            commands = self._before_decision(event) if self._settlement is None else self._settlement.handle(event)
        except InvalidTransition as bug:
            bug.add_note(f"the story: {', '.join(self._story)}")
            raise
        if commands and isinstance(commands[-1], Finish):
            self.outcome = commands[-1]
            self._stage = Stage.OVER
        return commands

    def _before_decision(self, event: on.Event) -> list[Command]:
        try:
            return self._on_event(event)
        except Refused as refusal:
            return self._end(MeetingOver.REFUSED, str(refusal), refusal.code, refusal.detail)
        except PeerMisbehaved as error:
            return self._end(MeetingOver.MISBEHAVED, str(error), RefusalCode.BAD_MESSAGE, str(error))

    def _on_event(self, event: on.Event) -> list[Command]:
        match event:
            case on.Started() if self.stage is Stage.OPENING:
                return [on.Allow(self._deadline_s), on.Tell(ask.Open(self.number, self.fragment))]
            case on.TrainerAnswered(reply):
                return self._on_trainer(reply)
            case on.TrainerGone():
                return self._end(MeetingOver.ABANDONED, "the trainer went away", RefusalCode.NOT_READY, "trainer restarting")
            case on.PartnerSent(message):
                return self._on_message(message)
            case on.PartnerGone():
                return self._on_partner_gone()
            case on.PartnerBroke(error):
                raise error
            case on.Resolved(outcome) if self.stage is Stage.IN_DOUBT:
                return self._on_resolved(outcome)
            case on.DeadlinePassed():
                return self._on_deadline()
            case on.Stopped(reason, code):
                return [] if self._awaits_decision else self._end(MeetingOver.ABANDONED, reason, code, reason)
        raise InvalidTransition(f"{event} in {self.stage.name}")

    @property
    def _awaits_decision(self) -> bool:
        """Whether it may count already without our knowing."""
        return self.stage is Stage.IN_DOUBT or (self.stage is Stage.JUDGING and not self.initiates)

    # ------------------------------------------------------------------ own trainer

    def _on_trainer(self, reply: ask.Reply) -> list[Command]:
        match self.stage, reply:
            case Stage.OPENING, ask.Opened():
                return self._greet(reply)
            case Stage.OPENING, ask.Unavailable(reason=reason):
                return self._end(MeetingOver.BUSY, reason, RefusalCode.BUSY, reason)
            case ((Stage.PREPARING | Stage.ENCODING | Stage.CHECKING), ask.Unavailable(reason=reason)):
                return self._end(MeetingOver.ABANDONED, reason, RefusalCode.NOT_READY, reason)
            case Stage.PREPARING, ask.SketchReady():
                self._stage = Stage.SKETCHING
                return [on.SendPart(Part.SKETCH), *self._advance()]
            case ((Stage.PREPARING | Stage.ENCODING), ask.PayloadReady(sha256=digest)):
                self._stage = Stage.COMMITTING
                own = Commitment(self.pairing.meeting_id, bytes.fromhex(digest)).signed(self._greeting.membership.identity)
                return [on.Send(own), *self._advance()]
            case Stage.CHECKING, ask.Checked(accepted=False, reason=reason):
                return self._end(MeetingOver.GATED, reason, RefusalCode.GATE, reason)
            case Stage.CHECKING, ask.Checked(failed_blocks=failed_blocks):
                self._own_failed = bytes.fromhex(failed_blocks)
                self._stage = Stage.JUDGING
                return self._advance() if self.initiates else [on.Send(Verdict(self.pairing.meeting_id, self._own_failed))]
        raise InvalidTransition(f"{reply} in {self.stage.name}")

    def _greet(self, opened: ask.Opened) -> list[Command]:
        self._own_hello = own = self._greeting.hello(opened)
        partner = self._greeting.partner_hello
        if partner is not None:
            return [on.Send(own), *self._pair(partner, pairing(partner, own))]
        self._stage = Stage.GREETING
        return [on.Send(own), on.Allow(GREETING_SHARE * self._deadline_s)]

    # ------------------------------------------------------------------ partner

    def _on_message(self, message: Message) -> list[Command]:
        if isinstance(message, Refusal):
            over = MeetingOver.BUSY if message.code is RefusalCode.BUSY else MeetingOver.REFUSED
            return self._end(over, f"{message.code.name}: {message.detail}", refusal=message.code)
        handlers: dict[type, Callable[[Any], list[Command]]] = {
            Hello: self._on_hello,
            Chunk: self._on_chunk,
            Commitment: self._on_commitment,
            Verdict: self._on_verdict,
            Commit: self._on_commit,
        }
        handler = handlers.get(type(message))
        if handler is None:
            raise BadMessage(f"a {type(message).__name__} out of turn")
        return handler(message)

    def _on_hello(self, hello: Hello) -> list[Command]:
        own = self._own_hello
        if self.stage is not Stage.GREETING or own is None:
            raise BadMessage("a second Hello")
        self._greeting.check_answer(hello, own)
        return self._pair(hello, pairing(own, hello))

    def _pair(self, partner: Hello, pair: Pairing) -> list[Command]:
        self._partner.hello = partner
        self.pairing = pair
        self._stage = Stage.PREPARING
        prepare = ask.Prepare(self.number, partner.tokens, partner.clock_steps, pair.seed, pair.stage)
        return [on.Allow(self._deadline_s), on.Tell(prepare)]

    def _on_chunk(self, chunk: Chunk) -> list[Command]:
        self._partner.take_chunk(chunk)
        return [on.Store(chunk.part, chunk.data), *self._advance()]

    def _on_commitment(self, commitment: Commitment) -> list[Command]:
        self._partner.take_commitment(commitment, self.pairing.meeting_id)
        return self._advance()

    def _on_verdict(self, verdict: Verdict) -> list[Command]:
        if not self.initiates:
            raise BadMessage("a verdict from the side that decides")
        self._partner.take_verdict(verdict, self.pairing.meeting_id)
        return self._advance()

    def _on_commit(self, commit: Commit) -> list[Command]:
        if not self._awaits_decision or commit.meeting_id != self.pairing.meeting_id:
            raise BadMessage("a Commit out of turn")
        return self._decide(commit.failed_blocks)

    def _on_partner_gone(self) -> list[Command]:
        if self._awaits_decision:
            return self._doubt()
        return self._end(MeetingOver.FAILED, "the partner's stream ended")

    # ------------------------------------------------------------------ both halves there?

    def _advance(self) -> list[Command]:
        partner = self._partner
        if self.stage is Stage.SKETCHING and partner.has_sketch:
            self._stage = Stage.ENCODING
            return [on.Tell(ask.Encode(self.number))]
        if self.stage is Stage.COMMITTING and partner.commitment is not None:
            self._stage = Stage.EXCHANGING
            return [on.SendPart(Part.PAYLOAD), *self._advance()]
        if self.stage is Stage.EXCHANGING and partner.has_payload:
            self._stage = Stage.CHECKING
            return [on.Tell(ask.Check(self.number))]
        if self.stage is Stage.JUDGING and self.initiates and partner.verdict is not None:
            return self._decide(union(self._own_failed, partner.verdict.failed_blocks))
        return []

    # ------------------------------------------------------------------ decision, doubt, end

    def _decide(self, failed_blocks: bytes) -> list[Command]:
        self._partner.need_bitmap(failed_blocks, self._own_failed)
        self._settlement = Settlement(self.number, Commit(self.pairing.meeting_id, failed_blocks), self.initiates)
        return self._settlement.begin()

    def _doubt(self) -> list[Command]:
        if self.stage is Stage.IN_DOUBT:
            return []
        self._stage = Stage.IN_DOUBT
        return [on.Allow(DOUBT_S), on.AskAgain(self.pairing.meeting_id)]

    def _on_resolved(self, outcome: Outcome) -> list[Command]:
        if outcome.meeting_id != self.pairing.meeting_id:
            raise BadMessage("the outcome of another meeting")
        if outcome.decision is Decision.COMMITTED:
            return self._decide(outcome.failed_blocks)
        return self._end(MeetingOver.FAILED, "the stream broke before the decision, which was to drop it")

    def _on_deadline(self) -> list[Command]:
        if self.stage is Stage.IN_DOUBT:
            return self._end(MeetingOver.FAILED, "the stream broke before the decision, and the partner cannot be asked")
        if self._awaits_decision:
            return self._doubt()
        over = MeetingOver.ABANDONED if self.stage in TRAINERS_TURN else MeetingOver.FAILED
        return self._end(over, f"the deadline passed while {self.stage.name.lower()}", RefusalCode.TOO_SLOW)

    def _end(
        self, over: MeetingOver, reason: str, say: RefusalCode | None = None, detail: str = "", *, refusal: RefusalCode | None = None
    ) -> list[Command]:
        """End before the decision. `say` is what the partner is told, unless we initiate and it has not heard of us yet."""
        commands: list[Command] = [on.Drop(), Finish(over, reason, refusal)]
        if say is None or (self.initiates and self.stage is Stage.OPENING):
            return commands
        return [on.Send(Refusal(say, detail[:REFUSAL_DETAIL_CHARS])), *commands]
