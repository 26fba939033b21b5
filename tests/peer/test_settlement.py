"""From the decision on nothing that the partner does can undo a meeting."""

from __future__ import annotations

import itertools

import pytest

from peer import meeting_events as on
from peer import requests as ask
from peer.meeting_events import Finish, MeetingOver, Stage
from peer.settlement import NOT_CONFIRMED, InvalidTransition, Settlement
from protocol.errors import BadMessage
from protocol.messages import Commit, Committed, Refusal, RefusalCode

MEETING_ID = b"m" * 16
COMMIT = Commit(MEETING_ID, b"\x01")
FROM_THE_PARTNER: list[on.Event] = [
    on.PartnerSent(Refusal(RefusalCode.LEAVING)),
    on.PartnerSent(COMMIT),
    on.PartnerBroke(BadMessage("garbage")),
    on.PartnerGone(),
    on.DeadlinePassed(),
    on.Stopped("leaving", RefusalCode.LEAVING),
]


def settle(initiates: bool, *events: on.Event) -> list[on.Command]:
    settlement = Settlement(1, COMMIT, initiates)
    return [*settlement.begin(), *itertools.chain.from_iterable(settlement.handle(event) for event in events)]


def applies(commands: list[on.Command]) -> list[ask.Request]:
    return [command.request for command in commands if isinstance(command, on.Tell)]


APPLY = [ask.Apply(1, MEETING_ID.hex(), "01")]


def test_initiator_records_applies_tells_and_waits_for_the_word() -> None:
    commands = settle(True, on.Journaled(), on.TrainerAnswered(ask.Applied(1)))
    assert [type(command) for command in commands] == [on.Journal, on.Tell, on.Send, on.Allow]
    assert commands[0] == on.Journal(MEETING_ID, b"\x01") and commands[2] == on.Send(COMMIT)
    commands = settle(True, on.Journaled(), on.TrainerAnswered(ask.Applied(1)), on.PartnerSent(Committed(MEETING_ID)))
    assert commands[-1] == Finish(MeetingOver.COMPLETED, "")


def test_the_word_may_come_before_the_trainers() -> None:
    commands = settle(True, on.Journaled(), on.PartnerSent(Committed(MEETING_ID)), on.TrainerAnswered(ask.Applied(1)))
    assert commands[-1] == Finish(MeetingOver.COMPLETED, "")


def test_responder_records_applies_and_says_so() -> None:
    commands = settle(False, on.Journaled(), on.TrainerAnswered(ask.Applied(1)))
    assert [type(command) for command in commands] == [on.Journal, on.Tell, on.Send, Finish]
    assert commands[2] == on.Send(Committed(MEETING_ID)) and commands[3] == Finish(MeetingOver.COMPLETED, "")


@pytest.mark.parametrize("initiates", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("event", FROM_THE_PARTNER, ids=lambda event: type(event).__name__)
def test_nothing_from_the_partner_undoes_it(initiates: bool, place: int, event: on.Event) -> None:
    events: list[on.Event] = [on.Journaled(), on.TrainerAnswered(ask.Applied(1)), on.DeadlinePassed()]
    events.insert(place, event)
    settlement = Settlement(1, COMMIT, initiates)
    commands = settlement.begin()
    for each in events:
        if not isinstance(commands[-1], Finish):
            commands += settlement.handle(each)
    assert applies(commands) == APPLY
    assert isinstance(commands[-1], Finish) and commands[-1].over is MeetingOver.COMPLETED
    assert commands[-1].reason == (NOT_CONFIRMED if initiates else "")
    assert not any(isinstance(command, on.Drop) for command in commands)


def test_a_committed_of_another_meeting_confirms_nothing() -> None:
    commands = settle(True, on.Journaled(), on.TrainerAnswered(ask.Applied(1)), on.PartnerSent(Committed(b"x" * 16)))
    assert commands[-1] == Finish(MeetingOver.COMPLETED, NOT_CONFIRMED)


def test_initiator_with_a_full_disk_decides_nothing() -> None:
    commands = settle(True, on.NotJournaled("no space left"))
    assert [type(command) for command in commands[1:]] == [on.Send, on.Drop, Finish]
    assert isinstance(commands[-1], Finish) and commands[-1].over is MeetingOver.ABANDONED and "no space left" in commands[-1].reason


def test_responder_with_a_full_disk_applies_what_its_partner_counts() -> None:
    assert applies(settle(False, on.NotJournaled("no space left"))) == APPLY


@pytest.mark.parametrize("initiates", [True, False])
@pytest.mark.parametrize("loss", [on.TrainerGone(), on.TrainerAnswered(ask.Unavailable(1, "restarted"))])
def test_a_trainer_that_dies_with_it_is_named(initiates: bool, loss: on.Event) -> None:
    commands = settle(initiates, on.Journaled(), loss)
    assert isinstance(commands[-1], Finish) and commands[-1].over is MeetingOver.ABANDONED
    assert "lost here" in commands[-1].reason


def test_what_cannot_happen() -> None:
    for events in ([on.Started()], [on.TrainerAnswered(ask.Applied(1))], [on.Journaled(), on.Journaled()]):
        with pytest.raises(InvalidTransition):
            settle(True, *events)


def test_the_stages() -> None:
    settlement = Settlement(1, COMMIT, True)
    stages = [settlement.stage]
    for event in (on.Journaled(), on.TrainerAnswered(ask.Applied(1))):
        settlement.handle(event)
        stages.append(settlement.stage)
    assert stages == [Stage.RECORDING, Stage.APPLYING, Stage.CONFIRMING]
