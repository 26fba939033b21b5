"""From the decision on: recorded, applied, told, in this order, and nothing that the partner does takes the outer step back."""

from __future__ import annotations

import pytest

from gossamer.peer.link import messages
from gossamer.peer.meeting import words as on
from gossamer.peer.meeting.machine import CONFIRM_S, NOT_CONFIRMED, DecidedMeeting, InvalidTransition
from gossamer.peer.meeting.words import Finish, MeetingOutcome, MeetingState
from gossamer.protocol.errors import BadMessage, RefusalCode
from gossamer.protocol.messages.messages import Commit, Committed, Refusal

MEETING_ID = b"m" * 16
COMMIT = Commit(MEETING_ID, b"\x05")
APPLY = on.Tell(messages.Apply(3, MEETING_ID.hex(), "05"))
APPLIED = on.TrainerAnswered(messages.Applied(3))
CONFIRMED = on.PartnerSent(Committed(MEETING_ID))
LAST_WORDS = [
    on.PartnerGone(),
    on.PartnerBroke(BadMessage("noise")),
    on.PartnerSent(Refusal(RefusalCode.LEAVING)),
    on.PartnerSent(COMMIT),
    on.PartnerSent(Committed(b"x" * 16)),
    on.DeadlinePassed(),
    on.Stopped("leaving", RefusalCode.LEAVING),
]


def settled(initiates: bool, *events: on.Event) -> tuple[DecidedMeeting, list[on.Command]]:
    settlement = DecidedMeeting(3, COMMIT, initiates)
    commands = settlement.begin()
    for event in events:
        commands = settlement.handle(event)
    return settlement, commands


@pytest.mark.parametrize("initiates", [True, False])
def test_it_is_on_disk_before_the_trainer_and_the_trainer_before_the_partner(initiates: bool) -> None:
    settlement, commands = settled(initiates)
    assert commands == [on.WriteDown(MEETING_ID, b"\x05")] and settlement.state is MeetingState.RECORDING
    settlement, commands = settled(initiates, on.Journaled())
    assert commands == [APPLY, on.Send(COMMIT if initiates else Committed(MEETING_ID))]
    assert settlement.state is MeetingState.APPLYING


def test_a_responder_is_done_when_it_has_applied() -> None:
    _, commands = settled(False, on.Journaled(), APPLIED)
    assert commands == [Finish(MeetingOutcome.COMPLETED, "")]


def test_an_initiator_waits_a_while_to_hear_that_the_partner_knows() -> None:
    settlement, commands = settled(True, on.Journaled(), APPLIED)
    assert commands == [on.Allow(CONFIRM_S)] and settlement.state is MeetingState.CONFIRMING
    assert settlement.handle(CONFIRMED) == [Finish(MeetingOutcome.COMPLETED, "")]
    _, commands = settled(True, on.Journaled(), CONFIRMED, APPLIED)
    assert commands == [Finish(MeetingOutcome.COMPLETED, "")]


@pytest.mark.parametrize("event", LAST_WORDS, ids=repr)
def test_it_counts_whatever_comes_instead_of_the_confirmation(event: on.Event) -> None:
    _, commands = settled(True, on.Journaled(), APPLIED, event)
    assert commands == [Finish(MeetingOutcome.COMPLETED, NOT_CONFIRMED)]


@pytest.mark.parametrize("initiates", [True, False])
@pytest.mark.parametrize("event", LAST_WORDS, ids=repr)
def test_nothing_takes_the_outer_step_back_before_it_is_applied(event: on.Event, initiates: bool) -> None:
    for before in ((), (on.Journaled(),)):
        settlement, commands = settled(initiates, *before, event)
        assert commands == []
        rest: list[on.Event] = [APPLIED] if before else [on.Journaled(), APPLIED]
        told = [command for later in rest for command in settlement.handle(later)]
        if not isinstance(told[-1], Finish):
            told += settlement.handle(on.DeadlinePassed())
        assert told[-1] == Finish(MeetingOutcome.COMPLETED, NOT_CONFIRMED if initiates else "")
        assert before or told[0] == APPLY
        assert not any(isinstance(command, on.Forget) for command in told)


def test_a_partner_that_is_gone_is_not_waited_for() -> None:
    _, commands = settled(True, on.Journaled(), on.PartnerGone(), APPLIED)
    assert commands == [Finish(MeetingOutcome.COMPLETED, NOT_CONFIRMED)]


def test_an_initiator_that_cannot_record_drops_and_a_responder_applies() -> None:
    _, commands = settled(True, on.NotJournaled("no space left"))
    refusal, drop, finish = commands
    assert isinstance(refusal, on.Send) and isinstance(refusal.message, Refusal) and drop == on.Forget()
    assert isinstance(finish, Finish) and finish.outcome is MeetingOutcome.ABANDONED and "no space left" in finish.reason
    _, commands = settled(False, on.NotJournaled("no space left"))  # the initiator's journal is the one that is asked
    assert commands[0] == APPLY


@pytest.mark.parametrize("initiates", [True, False])
@pytest.mark.parametrize("event", [on.TrainerGone(), on.TrainerAnswered(messages.Unavailable(3, "restarted"))], ids=repr)
def test_a_trainer_that_dies_before_it_applied_loses_the_step_here(event: on.Event, initiates: bool) -> None:
    _, (drop, finish) = settled(initiates, on.Journaled(), event)
    assert (
        drop == on.Forget() and isinstance(finish, Finish) and finish.outcome is MeetingOutcome.ABANDONED and "lost here" in finish.reason
    )


def test_a_trainer_that_dies_after_it_applied_loses_nothing() -> None:
    settlement, _ = settled(True, on.Journaled(), APPLIED)
    assert settlement.handle(on.TrainerGone()) == []
    assert settlement.handle(CONFIRMED) == [Finish(MeetingOutcome.COMPLETED, "")]


@pytest.mark.parametrize("events", [(on.Started(),), (APPLIED,), (on.Journaled(), on.Journaled())], ids=repr)
def test_what_cannot_happen_is_our_own_bug(events: tuple[on.Event, ...]) -> None:
    settlement, _ = settled(True, *events[:-1])
    with pytest.raises(InvalidTransition):
        settlement.handle(events[-1])
