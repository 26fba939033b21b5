"""One side of a meeting as a state machine: events in, commands out; no I/O, no clock, no tensors. Its table: docs/concepts/meeting.md.

The partner may be one state ahead: `PartnerSide` keeps what arrives early, and an automatic transition follows when both sides are ready.
The initiator snapshots its fragment before it connects, because a partner that is connected hangs up on silence.

The initiator decides, by its journal. Before that point every failure drops the meeting on both sides; after it the meeting counts,
whatever the partner does. A responder that loses the stream between its verdict and the decision asks for the decision; without an answer
in time it drops the meeting. If no retry can deliver the decision, the meeting counts for the initiator alone (the two generals' problem).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossamer.peer.link.messages import Applied, Checked, Opened, PayloadReady, SketchReady, Unavailable
from gossamer.peer.meeting import events
from gossamer.peer.meeting.actions import Actions
from gossamer.peer.meeting.commands import Command, Finish, SetTimer
from gossamer.peer.meeting.interface import DECIDED, Greeting, MeetingOutcome, MeetingState, Role, Timer
from gossamer.peer.meeting.line import transfer_s
from gossamer.protocol.errors import PeerMisbehaved, RefusalCode, Refused
from gossamer.protocol.limits import CHUNK_BYTES
from gossamer.protocol.messages.messages import Chunk, Commit, Commitment, Committed, Hello, Refusal, Verdict

CONNECT_S = 15.0
AGAIN_S = 5.0  # to connect to a partner that was met before: while a search waits for a dead partner, it meets nobody
SILENCE_SHARE = 1 / 3  # of the deadline: how long a partner may be silent while its trainer works or bytes are in transit
DOUBT_S = 20.0  # how long a responder asks for a missed decision
DOUBT_TIMEOUTS = 2.0  # the same in timeouts of a partner that fell silent, if that is less; a partner whose stream ended may be restarting
CONFIRM_S = 5.0  # how long an initiator that has applied waits for Committed
STORY_EVENTS = 64


class Automatic:
    """Stands for no event: the transition follows as soon as its state is entered or an event was taken, and its guard holds."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A row of the table: in these states, on these events, run the action, enter the next state and set the timer.

    `events` are classes: of events, of the trainer's replies, of the partner's messages. A row for a message (or reply) precedes one for
    PartnerSent (or TrainerAnswered); of several rows the first whose guard holds is taken.
    """

    states: tuple[MeetingState, ...]
    events: tuple[type, ...]
    action: Callable[[Actions, Any], list[Command]]
    next_state: MeetingState | None = None  # None: the state stays
    timer: Timer | None = None  # None: the timer keeps running
    role: Role | None = None  # None: both
    guard: Callable[[Actions, Any], bool] | None = None


class InvalidTransition(AssertionError):
    """An event that cannot happen in this state: our own bug. Its note lists the events so far."""


class Meeting(Actions):
    """One side of one meeting.

    Feed `handle` every event, in order, and carry out the commands that it returns, in order, before the next event. Not thread-safe; holds
    no resources.
    """

    def __init__(self, number: int, greeting: Greeting) -> None:
        super().__init__(number, greeting)
        self.finish: Finish | None = None
        self._story: deque[str] = deque(maxlen=STORY_EVENTS)

    @property
    def is_decided(self) -> bool:
        """Whether the meeting counts and has not ended."""
        return self.state in DECIDED

    def handle(self, event: events.Event) -> list[Command]:
        """Take in one event and return what must be done now, in order.

        A partner that misbehaves ends the meeting with an outcome, not with an exception. Raises InvalidTransition on our own bugs only.
        """
        if self.finish is not None:
            return []
        self._story.append(f"{self.state.name} {type(event).__name__}")
        try:
            commands = self._follow(event)
        except Refused as refusal:
            commands = self.end(MeetingOutcome.REFUSED, str(refusal), refusal.code, refusal.detail)
        except PeerMisbehaved as error:
            commands = self.end(MeetingOutcome.MISBEHAVED, str(error), RefusalCode.BAD_MESSAGE, str(error))
        if commands and isinstance(commands[-1], Finish):
            self.finish, self.state = commands[-1], MeetingState.OVER
        return commands

    def _follow(self, event: events.Event) -> list[Command]:
        """Take the transition of an event, and all automatic ones that it makes possible."""
        content = (
            event.message if isinstance(event, events.PartnerSent) else event.reply if isinstance(event, events.TrainerAnswered) else event
        )
        transition = self._find(content, type(content), type(event))
        if transition is None:
            bug = InvalidTransition(f"{event} in {self.state.name}")
            bug.add_note(f"the story: {', '.join(self._story)}")
            raise bug
        commands: list[Command] = []
        timer: Timer | None = None
        while transition is not None:
            commands += transition.action(self, content)
            self.state = transition.next_state or self.state
            timer = transition.timer or timer
            transition = self._find(content, Automatic)
        if timer is not None and self.state is not MeetingState.OVER:
            commands.insert(0, SetTimer(self.seconds(timer)))
        return commands

    def _find(self, content: object, *kinds: type) -> Transition | None:
        rows = [row for row in TABLE if self.state in row.states and row.role in (None, self.role)]
        found = (row for kind in kinds for row in rows if kind in row.events and (row.guard is None or row.guard(self, content)))
        return next(found, None)

    def seconds(self, timer: Timer) -> float:
        """Return how long a timer of this meeting runs."""
        greeting, sizes = self.greeting, self.greeting.fragment_terms
        match timer:
            case Timer.TRAINER:
                return greeting.membership.deadline_s
            case Timer.CONNECT:
                return CONNECT_S if greeting.timeout_s == math.inf else AGAIN_S
            case Timer.DOUBT:
                return DOUBT_S
            case Timer.SHORT_DOUBT:
                return min(DOUBT_S, DOUBT_TIMEOUTS * greeting.timeout_s)
            case Timer.CONFIRM:
                return CONFIRM_S
        in_transit = {Timer.CHUNK: CHUNK_BYTES, Timer.SKETCH: sizes.sketch_bytes, Timer.PAYLOAD: sizes.payload_bytes}.get(timer, 0)
        silence_s = SILENCE_SHARE * greeting.membership.deadline_s + transfer_s(min(in_transit, sizes.payload_bytes))
        return min(silence_s, greeting.timeout_s)


_S, _T, _A = MeetingState, Timer, Actions  # short, so that a row fits a line
_INITIATOR, _RESPONDER = Role.INITIATOR, Role.RESPONDER
_UNDECIDED = tuple(state for state in MeetingState if state not in {*DECIDED, MeetingState.OVER})

TABLE = (
    # greeting
    Transition((_S.OPENING,), (events.Started,), _A.open, timer=_T.TRAINER),
    Transition((_S.OPENING,), (Opened,), _A.connect, _S.CONNECTING, _T.CONNECT, _INITIATOR),
    Transition((_S.OPENING,), (Opened,), _A.answer, _S.PREPARING, _T.TRAINER, _RESPONDER),
    Transition((_S.OPENING,), (Unavailable,), _A.end_busy, _S.OVER),
    Transition((_S.CONNECTING,), (events.Connected,), _A.greet, _S.GREETING, _T.SILENCE, _INITIATOR),
    Transition((_S.GREETING,), (Hello,), _A.take_answer, _S.PREPARING, _T.TRAINER, _INITIATOR),
    # exchange
    Transition((_S.PREPARING,), (SketchReady,), _A.send_sketch, _S.SKETCHING, _T.CHUNK),
    Transition((_S.SKETCHING,), (Automatic,), _A.encode, _S.ENCODING, _T.TRAINER, guard=_A.has_sketch),
    Transition((_S.PREPARING, _S.ENCODING), (PayloadReady,), _A.commit_to_payload, _S.COMMITTING, _T.SKETCH),
    Transition((_S.COMMITTING,), (Automatic,), _A.send_payload, _S.EXCHANGING, _T.CHUNK, guard=_A.has_commitment),
    Transition((_S.EXCHANGING,), (Automatic,), _A.check, _S.CHECKING, _T.TRAINER, guard=_A.has_payload),
    Transition((_S.CHECKING,), (Checked,), _A.give_verdict, _S.AWAITING_DECISION, _T.PAYLOAD, guard=_A.is_accepted),
    Transition((_S.CHECKING,), (Checked,), _A.reject, _S.OVER),
    Transition((_S.PREPARING, _S.ENCODING, _S.CHECKING), (Unavailable,), _A.abandon, _S.OVER),
    Transition((_S.SKETCHING, _S.COMMITTING, _S.EXCHANGING), (Chunk,), _A.store, timer=_T.CHUNK, guard=_A.is_whole),
    Transition((_S.PREPARING, _S.ENCODING), (Chunk,), _A.store, timer=_T.TRAINER, guard=_A.is_whole),
    Transition((_S.PREPARING, _S.SKETCHING, _S.ENCODING, _S.COMMITTING, _S.EXCHANGING), (Chunk,), _A.store),
    Transition((_S.PREPARING, _S.ENCODING, _S.COMMITTING), (Commitment,), _A.take_commitment),
    Transition((_S.CHECKING, _S.AWAITING_DECISION), (Verdict,), _A.take_verdict, role=_INITIATOR),
    # decision, and doubt about it
    Transition((_S.AWAITING_DECISION,), (Automatic,), _A.decide, _S.RECORDING, role=_INITIATOR, guard=_A.has_verdict),
    Transition((_S.AWAITING_DECISION, _S.IN_DOUBT), (Commit,), _A.take_decision, _S.RECORDING, role=_RESPONDER),
    Transition((_S.AWAITING_DECISION,), (events.PartnerGone,), _A.ask_decision, _S.IN_DOUBT, _T.DOUBT, _RESPONDER),
    Transition((_S.AWAITING_DECISION,), (events.DeadlinePassed,), _A.ask_decision, _S.IN_DOUBT, _T.SHORT_DOUBT, _RESPONDER),
    Transition((_S.AWAITING_DECISION, _S.IN_DOUBT), (events.Stopped,), _A.ignore, role=_RESPONDER),
    Transition((_S.IN_DOUBT,), (events.PartnerGone,), _A.ignore, role=_RESPONDER),
    Transition((_S.IN_DOUBT,), (events.Resolved,), _A.take_decision, _S.RECORDING, role=_RESPONDER, guard=_A.is_commit),
    Transition((_S.IN_DOUBT,), (events.Resolved,), _A.end_dropped, _S.OVER, role=_RESPONDER),
    Transition((_S.IN_DOUBT,), (events.DeadlinePassed,), _A.give_up_asking, _S.OVER, role=_RESPONDER),
    # every end before the decision
    Transition(_UNDECIDED, (Refusal,), _A.take_refusal, _S.OVER),
    Transition(_UNDECIDED, (events.PartnerSent,), _A.blame_order, _S.OVER),
    Transition(_UNDECIDED, (events.PartnerMalformed,), _A.blame_frame, _S.OVER),
    Transition(_UNDECIDED, (events.PartnerGone,), _A.lose_partner, _S.OVER),
    Transition(_UNDECIDED, (events.TrainerGone,), _A.lose_trainer, _S.OVER),
    Transition(_UNDECIDED, (events.DeadlinePassed,), _A.time_out, _S.OVER),
    Transition(_UNDECIDED, (events.Stopped,), _A.stop, _S.OVER),
    # after the decision
    Transition((_S.RECORDING,), (events.Journaled,), _A.apply, _S.APPLYING),
    Transition((_S.RECORDING,), (events.NotJournaled,), _A.drop_unrecorded, _S.OVER, role=_INITIATOR),
    Transition((_S.RECORDING,), (events.NotJournaled,), _A.apply, _S.APPLYING, role=_RESPONDER),
    Transition((_S.APPLYING,), (Applied,), _A.ignore, _S.CONFIRMING, _T.CONFIRM),
    Transition((_S.APPLYING,), (Unavailable, events.TrainerGone), _A.lose_step, _S.OVER),
    Transition((_S.CONFIRMING,), (Automatic,), _A.complete, _S.OVER, guard=_A.partner_is_done),
    Transition(DECIDED, (Committed,), _A.note_confirmed, role=_INITIATOR, guard=_A.is_of_this_meeting),
    Transition(DECIDED, (events.PartnerGone, events.PartnerMalformed), _A.note_partner_done),
    Transition((_S.CONFIRMING,), (events.PartnerSent, events.DeadlinePassed, events.Stopped), _A.complete, _S.OVER),
    Transition((_S.RECORDING, _S.APPLYING), (events.PartnerSent, events.DeadlinePassed, events.Stopped), _A.ignore),
    Transition((_S.RECORDING, _S.CONFIRMING), (events.TrainerGone,), _A.ignore),
    Transition(DECIDED, (events.Resolved,), _A.ignore),
)
"""An event without a row is our own bug. Any action may end the meeting as REFUSED or MISBEHAVED instead, if the partner is to blame."""
