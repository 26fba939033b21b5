"""Whom a peer names to one that asks who is there: signed records of several members, so that the asker can go on without it.

The records are true or false by themselves; the rest travels under the signature of the header of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.protocol import limits
from gossamer.protocol.messages.frames import read_alone, write_alone
from gossamer.protocol.wire import peer_pb2

INTRODUCTION_BYTES = limits.INTRODUCED * (limits.RECORD_BYTES + 3) + 16  # at most: each record with its tag and length, and the time


@dataclass(frozen=True, slots=True)
class Introduction(limits.Bounded):
    """Members whom the sender knows, and its clock."""

    members: tuple[bytes, ...]  # at most 16 member records as their peers signed them, the sender's own among them
    unix_ms: int  # what time it is here

    def __post_init__(self) -> None:
        limits.Bounded.__post_init__(self)
        limits.need_record_sizes(self.members)

    def to_bytes(self) -> bytes:
        """Return what is sent."""
        return write_alone(peer_pb2.Introduction(), self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Introduction:
        """Read what came. Raises BadMessage; says nothing about the records."""
        return read_alone(cls, peer_pb2.Introduction(), data, "an introduction", INTRODUCTION_BYTES)
