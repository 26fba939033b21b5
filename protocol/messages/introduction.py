"""The reply to a peer-exchange request: signed records of several members, so that the requester no longer depends on one bootstrap node.

Each record carries its own signature. The signature of the reply's header covers the whole reply.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.protocol import limits
from gossamer.protocol.messages.frames import read_alone, write_alone
from gossamer.protocol.wire import peer_pb2

INTRODUCTION_BYTES = limits.INTRODUCED * (limits.RECORD_BYTES + 3) + 16  # upper bound: each record with its tag and length, and the time


@dataclass(frozen=True, slots=True)
class Introduction(limits.Bounded):
    """Members that the sender knows, and the sender's clock."""

    members: tuple[bytes, ...]  # at most 16 member records as their peers signed them, including the sender's own
    unix_ms: int  # the sender's clock: Unix milliseconds

    def __post_init__(self) -> None:
        limits.Bounded.__post_init__(self)
        limits.need_record_sizes(self.members)

    def to_bytes(self) -> bytes:
        """Return the encoded reply."""
        return write_alone(peer_pb2.Introduction(), self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Introduction:
        """Parse a reply. Raises BadMessage. The records are not parsed."""
        return read_alone(cls, peer_pb2.Introduction(), data, "an introduction", INTRODUCTION_BYTES)
