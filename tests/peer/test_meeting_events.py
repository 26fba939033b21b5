"""Every event in every stage: what the machine does about it is in this table, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from peer import meeting_events as on
from peer import requests as ask
from peer.meeting_events import DECIDED, MeetingOver, Stage
from peer.requests import Stage as RunStage
from peer.settlement import InvalidTransition
from protocol.errors import BadMessage
from protocol.identity import Identity
from protocol.messages import Chunk, Commit, Commitment, Committed, Decision, Message, Outcome, Part, Refusal, RefusalCode, Verdict
from tests.peer.test_meeting_misbehaved import partners_hello
from tests.peer.two_sides import SEEDS, Seat, alone

INITIATOR = [stage for stage in Stage if stage not in (Stage.IN_DOUBT, Stage.OVER)]
RESPONDER = [stage for stage in Stage if stage not in (Stage.GREETING, Stage.CONFIRMING, Stage.OVER)]
SEATS = [(True, stage) for stage in INITIATOR] + [(False, stage) for stage in RESPONDER]

IGNORED = "ignored"
GOES_ON = "goes on"
IMPOSSIBLE = "our own bug"
Reaction = str | MeetingOver

REPLIES: dict[str, ask.Reply] = {
    "Opened": ask.Opened(1, 10, 100, RunStage.TRAIN),
    "Unavailable": ask.Unavailable(1, "no"),
    "SketchReady": ask.SketchReady(1),
    "PayloadReady": ask.PayloadReady(1, "00" * 32),
    "Checked": ask.Checked(1, True, "", ""),
    "Applied": ask.Applied(1),
}
IN_TURN = {
    "Opened": {Stage.OPENING},
    "SketchReady": {Stage.PREPARING},
    "PayloadReady": {Stage.PREPARING, Stage.ENCODING},
    "Checked": {Stage.CHECKING},
}
MESSAGES: dict[str, Callable[[Seat], Message]] = {
    "Hello": lambda seat: partners_hello(),
    "Refusal": lambda seat: Refusal(RefusalCode.NOT_READY),
    "Chunk": lambda seat: Chunk(Part.SKETCH if seat.stage in (Stage.PREPARING, Stage.SKETCHING) else Part.PAYLOAD, 0, b"x"),
    "Commitment": lambda seat: Commitment(seat.meeting.pairing.meeting_id or bytes(16), bytes(32)).signed(
        Identity(SEEDS[seat.meeting.initiates])
    ),
    "Verdict": lambda seat: Verdict(seat.meeting.pairing.meeting_id or bytes(16)),
    "Commit": lambda seat: Commit(seat.meeting.pairing.meeting_id or bytes(16)),
    "Committed": lambda seat: Committed(seat.meeting.pairing.meeting_id or bytes(16)),
    "Resolve": lambda seat: Outcome(bytes(16), Decision.UNKNOWN),
}
FITS = {  # the partner may be a step ahead
    "Hello": {(True, Stage.GREETING)},
    "Chunk": {(side, stage) for side in (True, False) for stage in (Stage.PREPARING, Stage.SKETCHING, Stage.EXCHANGING)},
    "Commitment": {(side, stage) for side in (True, False) for stage in (Stage.ENCODING, Stage.COMMITTING)},
    "Verdict": {(True, Stage.CHECKING), (True, Stage.JUDGING)},
    "Commit": {(False, Stage.JUDGING), (False, Stage.IN_DOUBT)},
}
OWN_TURN = {Stage.OPENING, Stage.PREPARING, Stage.ENCODING, Stage.CHECKING}


def expected_reply(name: str, initiates: bool, stage: Stage) -> Reaction:
    if name == "Unavailable":
        if stage is Stage.OPENING:
            return MeetingOver.BUSY
        return MeetingOver.ABANDONED if stage in OWN_TURN | {Stage.APPLYING} else IMPOSSIBLE
    if name == "Applied" and stage is Stage.APPLYING:
        return GOES_ON if initiates else MeetingOver.COMPLETED
    return GOES_ON if stage in IN_TURN.get(name, ()) else IMPOSSIBLE


def expected_message(name: str, initiates: bool, stage: Stage) -> Reaction:
    if stage in DECIDED:
        return MeetingOver.COMPLETED if stage is Stage.CONFIRMING else IGNORED
    if name == "Refusal":
        return MeetingOver.REFUSED
    return GOES_ON if (initiates, stage) in FITS.get(name, ()) else MeetingOver.MISBEHAVED


def expected_event(kind: type, initiates: bool, stage: Stage) -> Reaction:
    awaits_decision = stage is Stage.IN_DOUBT or (stage is Stage.JUDGING and not initiates)
    if kind is on.Started:
        return GOES_ON if stage is Stage.OPENING else IMPOSSIBLE
    if kind in (on.Journaled, on.NotJournaled):
        if stage is not Stage.RECORDING:
            return IMPOSSIBLE
        return MeetingOver.ABANDONED if kind is on.NotJournaled and initiates else GOES_ON
    if kind is on.Resolved:
        return MeetingOver.FAILED if stage is Stage.IN_DOUBT else IGNORED if stage in DECIDED else IMPOSSIBLE
    if kind is on.TrainerGone:
        return IGNORED if stage in (Stage.RECORDING, Stage.CONFIRMING) else MeetingOver.ABANDONED
    if stage in DECIDED:
        return MeetingOver.COMPLETED if stage is Stage.CONFIRMING else IGNORED
    if kind is on.PartnerBroke:
        return MeetingOver.MISBEHAVED
    if kind is on.Stopped:
        return IGNORED if awaits_decision else MeetingOver.ABANDONED
    if kind is on.PartnerGone:
        return IGNORED if stage is Stage.IN_DOUBT else GOES_ON if awaits_decision else MeetingOver.FAILED
    assert kind is on.DeadlinePassed
    if awaits_decision:
        return MeetingOver.FAILED if stage is Stage.IN_DOUBT else GOES_ON
    return MeetingOver.ABANDONED if stage in OWN_TURN else MeetingOver.FAILED


EVENTS: dict[type, Callable[[Seat], on.Event]] = {
    on.Started: lambda seat: on.Started(),
    on.PartnerGone: lambda seat: on.PartnerGone(),
    on.PartnerBroke: lambda seat: on.PartnerBroke(BadMessage("garbage")),
    on.Resolved: lambda seat: on.Resolved(Outcome(seat.meeting.pairing.meeting_id or bytes(16), Decision.DROPPED)),
    on.Journaled: lambda seat: on.Journaled(),
    on.NotJournaled: lambda seat: on.NotJournaled("no space left"),
    on.DeadlinePassed: lambda seat: on.DeadlinePassed(),
    on.TrainerGone: lambda seat: on.TrainerGone(),
    on.Stopped: lambda seat: on.Stopped("leaving", RefusalCode.LEAVING),
}


def check(seat: Seat, event: on.Event, expected: Reaction) -> None:
    before = seat.stage
    if expected is IMPOSSIBLE:
        with pytest.raises(InvalidTransition) as bug:
            seat.feed(event)
        assert any("the story" in note for note in bug.value.__notes__)
        return
    commands = seat.feed(event)
    if isinstance(expected, MeetingOver):
        assert seat.over is expected and seat.stage is Stage.OVER
        assert seat.num_drops == (expected is not MeetingOver.COMPLETED)
        return
    assert seat.finish is None, seat.finish
    if expected == IGNORED:
        assert commands == [] and seat.stage is before
    else:
        assert commands or seat.stage is not before or isinstance(event, on.PartnerSent)


@pytest.mark.parametrize(("initiates", "stage"), SEATS)
@pytest.mark.parametrize("name", REPLIES)
def test_replies(name: str, initiates: bool, stage: Stage) -> None:
    check(alone(stage, initiates=initiates), on.TrainerAnswered(REPLIES[name]), expected_reply(name, initiates, stage))


@pytest.mark.parametrize(("initiates", "stage"), SEATS)
@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str, initiates: bool, stage: Stage) -> None:
    seat = alone(stage, initiates=initiates)
    check(seat, on.PartnerSent(MESSAGES[name](seat)), expected_message(name, initiates, stage))


@pytest.mark.parametrize(("initiates", "stage"), SEATS)
@pytest.mark.parametrize("kind", EVENTS)
def test_events(kind: type, initiates: bool, stage: Stage) -> None:
    seat = alone(stage, initiates=initiates)
    check(seat, EVENTS[kind](seat), expected_event(kind, initiates, stage))


def test_no_event_is_left_out() -> None:
    assert {*EVENTS, on.TrainerAnswered, on.PartnerSent} == set(get_args(on.Event))
    replies: set[Any] = {type(reply) for reply in REPLIES.values()}
    assert replies == set(get_args(ask.Reply)) - {ask.Cloned, ask.CannotClone, ask.Adopted}


@pytest.mark.parametrize("initiates", [True, False])
def test_after_the_end_nothing_happens(initiates: bool) -> None:
    seat = alone(Stage.EXCHANGING, initiates=initiates)
    seat.feed(on.PartnerGone())
    for make in EVENTS.values():
        assert seat.feed(make(seat)) == []
    for reply in REPLIES.values():
        assert seat.feed(on.TrainerAnswered(reply)) == []
