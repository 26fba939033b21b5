"""From the decision on: recorded, applied, sent, in this order; nothing that the partner does undoes the outer step."""

from __future__ import annotations

import pytest

from gossamer.peer.link.messages import Applied, Apply, Unavailable
from gossamer.peer.meeting.actions import NOT_CONFIRMED
from gossamer.peer.meeting.commands import AskTrainer, Command, DropMeeting, Finish, Send, SetTimer, WriteJournal
from gossamer.peer.meeting.events import (
    DeadlinePassed,
    Event,
    Journaled,
    NotJournaled,
    PartnerGone,
    PartnerMalformed,
    PartnerSent,
    Started,
    Stopped,
    TrainerAnswered,
    TrainerGone,
)
from gossamer.peer.meeting.interface import MeetingOutcome, MeetingState
from gossamer.peer.meeting.machine import CONFIRM_S, InvalidTransition
from gossamer.protocol.errors import BadMessage, RefusalCode
from gossamer.protocol.messages.messages import Commit, Committed, Refusal
from tests.peer.two_sides import Seat, alone

FAILED = b"\x05\x00\x00"
MEETING_ID = alone(MeetingState.RECORDING).meeting.pairing.meeting_id  # the nonces of these tests are fixed: always the same
COMMIT = Commit(MEETING_ID, FAILED)
APPLIED = TrainerAnswered(Applied(1))
CONFIRMED = PartnerSent(Committed(MEETING_ID))
LAST_EVENTS = [
    PartnerGone(),
    PartnerMalformed(BadMessage("noise")),
    PartnerSent(Refusal(RefusalCode.LEAVING)),
    PartnerSent(COMMIT),
    PartnerSent(Committed(b"x" * 16)),
    DeadlinePassed(),
    Stopped("leaving", RefusalCode.LEAVING),
]


def decided(initiates: bool, *events: Event) -> tuple[Seat, list[Command]]:
    """Return a side that has just decided and was fed these events, and its last commands."""
    seat = alone(MeetingState.RECORDING, initiates=initiates, failed_blocks=FAILED.hex())
    commands = seat.commands[-1:]
    for event in events:
        commands = seat.feed(event)
    return seat, commands


def apply(seat: Seat) -> AskTrainer:
    return AskTrainer(Apply(seat.meeting.number, MEETING_ID.hex(), FAILED.hex()))


@pytest.mark.parametrize("initiates", [True, False])
def test_the_decision_is_on_disk_before_the_trainer_applies_and_the_trainer_is_asked_before_the_partner_is(initiates: bool) -> None:
    seat, commands = decided(initiates)
    assert commands == [WriteJournal(MEETING_ID, FAILED)] and seat.state is MeetingState.RECORDING
    commands = seat.feed(Journaled())
    assert commands == [apply(seat), Send(COMMIT if initiates else Committed(MEETING_ID))]
    assert seat.state is MeetingState.APPLYING


def test_a_responder_finishes_when_it_has_applied() -> None:
    _, commands = decided(False, Journaled(), APPLIED)
    assert commands == [Finish(MeetingOutcome.COMPLETED, "")]


def test_an_initiator_waits_for_the_confirmation() -> None:
    seat, commands = decided(True, Journaled(), APPLIED)
    assert commands == [SetTimer(CONFIRM_S)] and seat.state is MeetingState.CONFIRMING
    assert seat.feed(CONFIRMED) == [Finish(MeetingOutcome.COMPLETED, "")]
    _, commands = decided(True, Journaled(), CONFIRMED, APPLIED)
    assert commands == [Finish(MeetingOutcome.COMPLETED, "")]


@pytest.mark.parametrize("event", LAST_EVENTS, ids=repr)
def test_a_meeting_without_a_confirmation_counts(event: Event) -> None:
    _, commands = decided(True, Journaled(), APPLIED, event)
    assert commands == [Finish(MeetingOutcome.COMPLETED, NOT_CONFIRMED)]


@pytest.mark.parametrize("initiates", [True, False])
@pytest.mark.parametrize("event", LAST_EVENTS, ids=repr)
def test_no_event_undoes_the_decision_before_it_is_applied(event: Event, initiates: bool) -> None:
    for before in ((), (Journaled(),)):
        seat, commands = decided(initiates, *before, event)
        assert commands == []
        later_events: list[Event] = [APPLIED] if before else [Journaled(), APPLIED]
        later = [command for event in later_events for command in seat.feed(event)]
        if not isinstance(later[-1], Finish):
            later += seat.feed(DeadlinePassed())
        assert later[-1] == Finish(MeetingOutcome.COMPLETED, NOT_CONFIRMED if initiates else "")
        assert before or later[0] == apply(seat)
        assert not any(isinstance(command, DropMeeting) for command in later)


def test_an_initiator_does_not_wait_for_a_partner_that_is_gone() -> None:
    _, commands = decided(True, Journaled(), PartnerGone(), APPLIED)
    assert commands == [Finish(MeetingOutcome.COMPLETED, NOT_CONFIRMED)]


def test_without_a_journal_record_an_initiator_drops_the_meeting_and_a_responder_applies_it() -> None:
    _, commands = decided(True, NotJournaled("no space left"))
    refusal, drop, finish = commands
    assert isinstance(refusal, Send) and isinstance(refusal.message, Refusal) and drop == DropMeeting()
    assert isinstance(finish, Finish) and finish.outcome is MeetingOutcome.ABANDONED and "no space left" in finish.reason
    seat, commands = decided(False, NotJournaled("no space left"))  # the initiator answers Resolve, from its own journal
    assert commands[0] == apply(seat)


@pytest.mark.parametrize("initiates", [True, False])
@pytest.mark.parametrize("event", [TrainerGone(), TrainerAnswered(Unavailable(3, "restarted"))], ids=repr)
def test_a_trainer_that_dies_before_it_applied_loses_the_step_on_this_side(event: Event, initiates: bool) -> None:
    _, (drop, finish) = decided(initiates, Journaled(), event)
    assert drop == DropMeeting() and isinstance(finish, Finish)
    assert finish.outcome is MeetingOutcome.ABANDONED and "lost here" in finish.reason


def test_a_trainer_that_dies_after_it_applied_loses_nothing() -> None:
    seat, _ = decided(True, Journaled(), APPLIED)
    assert seat.feed(TrainerGone()) == []
    assert seat.feed(CONFIRMED) == [Finish(MeetingOutcome.COMPLETED, "")]


@pytest.mark.parametrize("events", [(Started(),), (APPLIED,), (Journaled(), Journaled())], ids=repr)
def test_an_impossible_event_is_our_own_bug(events: tuple[Event, ...]) -> None:
    seat, _ = decided(True, *events[:-1])
    with pytest.raises(InvalidTransition):
        seat.feed(events[-1])
