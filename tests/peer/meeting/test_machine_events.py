"""Every event in every state: the expected reaction, written independently of the machine's own table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from gossamer.peer.link.messages import (
    Adopted,
    Applied,
    Checked,
    FragmentsMoved,
    Opened,
    PayloadReady,
    Reply,
    SketchReady,
    Unavailable,
    Written,
)
from gossamer.peer.meeting.events import (
    Connected,
    DeadlinePassed,
    Event,
    Journaled,
    NotJournaled,
    PartnerGone,
    PartnerMalformed,
    PartnerSent,
    Resolved,
    Started,
    Stopped,
    TrainerAnswered,
    TrainerGone,
)
from gossamer.peer.meeting.interface import DECIDED, MeetingOutcome, MeetingState
from gossamer.peer.meeting.machine import InvalidTransition
from gossamer.protocol.errors import BadMessage, RefusalCode
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import (
    Chunk,
    Commit,
    Commitment,
    Committed,
    Contents,
    ContentsKind,
    Message,
    Outcome,
    Part,
    Refusal,
    RunPhase,
    Verdict,
)
from tests.peer.meeting.test_machine_misbehaved import HELLO
from tests.peer.two_sides import SEEDS, Seat, alone

INITIATOR = [state for state in MeetingState if state not in (MeetingState.IN_DOUBT, MeetingState.OVER)]
CALLING = (MeetingState.CONNECTING, MeetingState.GREETING)
RESPONDER = [state for state in MeetingState if state not in (*CALLING, MeetingState.CONFIRMING, MeetingState.OVER)]
SEATS = [(True, state) for state in INITIATOR] + [(False, state) for state in RESPONDER]

IGNORED = "ignored"
GOES_ON = "goes on"
IMPOSSIBLE = "our own bug"
Reaction = str | MeetingOutcome

REPLIES: dict[str, Reply] = {
    "Opened": Opened(1, 10, 100, RunPhase.TRAIN),
    "Unavailable": Unavailable(1, "no"),
    "SketchReady": SketchReady(1, "00" * 32),
    "PayloadReady": PayloadReady(1, "00" * 32),
    "Checked": Checked(1, True, "", ""),
    "Applied": Applied(1),
}
IN_TURN = {
    "Opened": {MeetingState.OPENING},
    "SketchReady": {MeetingState.PREPARING},
    "PayloadReady": {MeetingState.PREPARING, MeetingState.ENCODING},
    "Checked": {MeetingState.CHECKING},
}
MESSAGES: dict[str, Callable[[Seat], Message]] = {
    "Hello": lambda seat: HELLO,
    "Refusal": lambda seat: Refusal(RefusalCode.NOT_READY),
    "Chunk": lambda seat: Chunk(Part.SKETCH if seat.state in (MeetingState.PREPARING, MeetingState.SKETCHING) else Part.PAYLOAD, 0, b"x"),
    "Commitment": lambda seat: Commitment(seat.meeting.pairing.meeting_id or bytes(16), bytes(32)).signed(
        Identity(SEEDS[seat.meeting.initiates])
    ),
    "Verdict": lambda seat: Verdict(seat.meeting.pairing.meeting_id or bytes(16)),
    "Commit": lambda seat: Commit(seat.meeting.pairing.meeting_id or bytes(16)),
    "Committed": lambda seat: Committed(seat.meeting.pairing.meeting_id or bytes(16)),
    "Resolve": lambda seat: Outcome(bytes(16), False),
    "Contents": lambda seat: Contents(ContentsKind.STATE, 800, b"d" * 32, 1, signature=b"s" * 64),
}
FITS = {  # the partner may be one state ahead
    "Hello": {(True, MeetingState.GREETING)},
    "Chunk": {
        (side, state) for side in (True, False) for state in (MeetingState.PREPARING, MeetingState.SKETCHING, MeetingState.EXCHANGING)
    },
    "Commitment": {(side, state) for side in (True, False) for state in (MeetingState.ENCODING, MeetingState.COMMITTING)},
    "Verdict": {(True, MeetingState.CHECKING), (True, MeetingState.AWAITING_DECISION)},
    "Commit": {(False, MeetingState.AWAITING_DECISION), (False, MeetingState.IN_DOUBT)},
}
OWN_TURN = {MeetingState.OPENING, MeetingState.PREPARING, MeetingState.ENCODING, MeetingState.CHECKING}


def expected_reply(name: str, initiates: bool, state: MeetingState) -> Reaction:
    if name == "Unavailable":
        if state is MeetingState.OPENING:
            return MeetingOutcome.BUSY
        return MeetingOutcome.ABANDONED if state in OWN_TURN | {MeetingState.APPLYING} else IMPOSSIBLE
    if name == "Applied" and state is MeetingState.APPLYING:
        return GOES_ON if initiates else MeetingOutcome.COMPLETED
    return GOES_ON if state in IN_TURN.get(name, ()) else IMPOSSIBLE


def expected_message(name: str, initiates: bool, state: MeetingState) -> Reaction:
    if state in DECIDED:
        return MeetingOutcome.COMPLETED if state is MeetingState.CONFIRMING else IGNORED
    if name == "Refusal":
        return MeetingOutcome.REFUSED
    return GOES_ON if (initiates, state) in FITS.get(name, ()) else MeetingOutcome.MISBEHAVED


def expected_event(kind: type, initiates: bool, state: MeetingState) -> Reaction:
    awaits_decision = state is MeetingState.IN_DOUBT or (state is MeetingState.AWAITING_DECISION and not initiates)
    if kind is Started:
        return GOES_ON if state is MeetingState.OPENING else IMPOSSIBLE
    if kind is Connected:
        return GOES_ON if state is MeetingState.CONNECTING else IMPOSSIBLE
    if kind in (Journaled, NotJournaled):
        if state is not MeetingState.RECORDING:
            return IMPOSSIBLE
        return MeetingOutcome.ABANDONED if kind is NotJournaled and initiates else GOES_ON
    if kind is Resolved:
        return MeetingOutcome.FAILED if state is MeetingState.IN_DOUBT else IGNORED if state in DECIDED else IMPOSSIBLE
    if kind is TrainerGone:
        return IGNORED if state in (MeetingState.RECORDING, MeetingState.CONFIRMING) else MeetingOutcome.ABANDONED
    if state in DECIDED:
        return MeetingOutcome.COMPLETED if state is MeetingState.CONFIRMING else IGNORED
    if kind is PartnerMalformed:
        return MeetingOutcome.MISBEHAVED
    if kind is Stopped:
        return IGNORED if awaits_decision else MeetingOutcome.ABANDONED
    if kind is PartnerGone:
        return IGNORED if state is MeetingState.IN_DOUBT else GOES_ON if awaits_decision else MeetingOutcome.FAILED
    assert kind is DeadlinePassed
    if awaits_decision:
        return MeetingOutcome.FAILED if state is MeetingState.IN_DOUBT else GOES_ON
    return MeetingOutcome.ABANDONED if state in OWN_TURN else MeetingOutcome.FAILED


EVENTS: dict[type, Callable[[Seat], Event]] = {
    Started: lambda seat: Started(),
    Connected: lambda seat: Connected(),
    PartnerGone: lambda seat: PartnerGone(),
    PartnerMalformed: lambda seat: PartnerMalformed(BadMessage("garbage")),
    Resolved: lambda seat: Resolved(Outcome(seat.meeting.pairing.meeting_id or bytes(16), False)),
    Journaled: lambda seat: Journaled(),
    NotJournaled: lambda seat: NotJournaled("no space left"),
    DeadlinePassed: lambda seat: DeadlinePassed(),
    TrainerGone: lambda seat: TrainerGone(),
    Stopped: lambda seat: Stopped("leaving", RefusalCode.LEAVING),
}


def check(seat: Seat, event: Event, expected: Reaction) -> None:
    before = seat.state
    if expected is IMPOSSIBLE:
        with pytest.raises(InvalidTransition) as bug:
            seat.feed(event)
        assert any("the story" in note for note in bug.value.__notes__)
        return
    commands = seat.feed(event)
    if isinstance(expected, MeetingOutcome):
        assert seat.over is expected and seat.state is MeetingState.OVER
        assert seat.num_drops == (expected is not MeetingOutcome.COMPLETED)
        if expected is MeetingOutcome.MISBEHAVED and before not in (MeetingState.OPENING, MeetingState.CONNECTING):
            assert isinstance(seat.sent[-1], Refusal) and seat.sent[-1].code is RefusalCode.BAD_MESSAGE
            assert not seat.trainer.applied and not seat.journal
        return
    assert seat.finish is None, seat.finish
    if expected == IGNORED:
        assert commands == [] and seat.state is before
    else:
        assert commands or seat.state is not before or isinstance(event, PartnerSent)


@pytest.mark.parametrize(("initiates", "state"), SEATS)
@pytest.mark.parametrize("name", REPLIES)
def test_each_reply_of_the_trainer_has_its_reaction(name: str, initiates: bool, state: MeetingState) -> None:
    check(alone(state, initiates=initiates), TrainerAnswered(REPLIES[name]), expected_reply(name, initiates, state))


@pytest.mark.parametrize(("initiates", "state"), SEATS)
@pytest.mark.parametrize("name", MESSAGES)
def test_each_message_of_the_partner_has_its_reaction(name: str, initiates: bool, state: MeetingState) -> None:
    seat = alone(state, initiates=initiates)
    check(seat, PartnerSent(MESSAGES[name](seat)), expected_message(name, initiates, state))


@pytest.mark.parametrize(("initiates", "state"), SEATS)
@pytest.mark.parametrize("kind", EVENTS)
def test_each_event_has_its_reaction(kind: type, initiates: bool, state: MeetingState) -> None:
    seat = alone(state, initiates=initiates)
    check(seat, EVENTS[kind](seat), expected_event(kind, initiates, state))


def test_no_event_is_left_out() -> None:
    assert {*EVENTS, TrainerAnswered, PartnerSent} == set(Event.__subclasses__())
    replies: set[Any] = {type(reply) for reply in REPLIES.values()}
    assert replies == set(get_args(Reply)) - {Written, Adopted, FragmentsMoved}


@pytest.mark.parametrize("initiates", [True, False])
def test_after_the_end_nothing_happens(initiates: bool) -> None:
    seat = alone(MeetingState.EXCHANGING, initiates=initiates)
    seat.feed(PartnerGone())
    for make in EVENTS.values():
        assert seat.feed(make(seat)) == []
    for reply in REPLIES.values():
        assert seat.feed(TrainerAnswered(reply)) == []
