"""The events of a carrier: what it takes in."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.peer.link.messages import HopReply
from gossamer.peer.pipeline.lane import DownLane, UpLane
from gossamer.protocol.messages.messages import Message


@dataclass(frozen=True, slots=True)
class LaneOpened:
    """Both sides have greeted each other on a lane."""

    lane: UpLane | DownLane


@dataclass(frozen=True, slots=True)
class LaneSaid:
    """A well-formed message arrived on a lane."""

    lane: int
    message: Message


@dataclass(frozen=True, slots=True)
class LaneGone:
    """A lane has ended."""

    lane: int


@dataclass(frozen=True, slots=True)
class HopSent:
    """The last bytes of an answer have left."""

    hop: int


@dataclass(frozen=True, slots=True)
class TrainerReplied:
    """Own trainer replied to a request about a hop."""

    reply: HopReply


@dataclass(frozen=True, slots=True)
class HopLost:
    """The link to the trainer broke before the reply to a request about a hop."""

    hop: int


@dataclass(frozen=True, slots=True)
class FileLost:
    """A file of a hop is missing, or could not be written or read. A request about the hop may be open."""

    hop: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """`Carrier.next_s` has come."""


@dataclass(frozen=True, slots=True)
class HopsStopped:
    """Begin no hop, and end those that have not left stage 0. Others that are under way are answered."""

    is_final: bool = True  # and accept none any more


Event = LaneOpened | LaneSaid | LaneGone | HopSent | TrainerReplied | HopLost | FileLost | TimePassed | HopsStopped
