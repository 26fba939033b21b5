"""The commands of a meeting: what its machine asks the driver for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import dataclass_transform

from gossamer.peer.link.messages import MeetingRequest
from gossamer.peer.meeting.interface import MeetingOutcome
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.messages.messages import Message, Part


@dataclass_transform(frozen_default=True)
class Command:
    """Makes a frozen dataclass of each subclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class AskTrainer(Command):
    """Send a request to own trainer; TrainerAnswered or TrainerGone follows."""

    request: MeetingRequest


class Connect(Command):
    """Open a stream to the partner; Connected or PartnerGone follows."""


class Send(Command):
    """Send one frame to the partner."""

    message: Message


class SendPart(Command):
    """Send the file of own sketch or payload as chunks."""

    part: Part


class Store(Command):
    """Append bytes to the file of the partner's sketch or payload."""

    part: Part
    data: bytes


class WriteJournal(Command):
    """Write to disk that the meeting counts; Journaled or NotJournaled follows."""

    meeting_id: bytes
    failed_blocks: bytes


class AskDecision(Command):
    """Ask the partner on a new stream what it decided, until it answers; Resolved follows."""

    meeting_id: bytes


class SetTimer(Command):
    """Report DeadlinePassed after this time; replaces the timer that is running."""

    seconds: float


class DropMeeting(Command):
    """Have own trainer release the fragment without an outer step."""


class Finish(Command):
    """The meeting is over; always the last command."""

    outcome: MeetingOutcome
    reason: str
    refusal: RefusalCode | None = None  # the partner's code, if it refused
