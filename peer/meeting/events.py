"""The events of a meeting: what one side's machine takes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import dataclass_transform

from gossamer.peer.link.messages import Reply
from gossamer.protocol.errors import PeerMisbehaved, RefusalCode
from gossamer.protocol.messages.messages import Message, Outcome


@dataclass_transform(frozen_default=True)
class Event:
    """Makes a frozen dataclass of each subclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Started(Event):
    """The meeting starts; a responder already has its stream."""


class TrainerAnswered(Event):
    """Own trainer replied to the last AskTrainer."""

    reply: Reply


class Connected(Event):
    """The stream to the partner is open."""


class PartnerSent(Event):
    """A well-formed frame arrived from the partner."""

    message: Message


class PartnerGone(Event):
    """The stream ended, or could not be opened."""


class PartnerMalformed(Event):
    """The partner sent a frame that is not a valid message."""

    error: PeerMisbehaved


class Resolved(Event):
    """The partner answered AskDecision."""

    outcome: Outcome


class Journaled(Event):
    """The decision is on disk."""


class NotJournaled(Event):
    """The decision could not be written to disk."""

    reason: str


class DeadlinePassed(Event):
    """The last timer expired."""


class TrainerGone(Event):
    """The link to own trainer broke."""


class Stopped(Event):
    """Our own node ends the meeting."""

    reason: str
    code: RefusalCode  # sent to the partner
