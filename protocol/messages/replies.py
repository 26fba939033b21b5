"""The replies of the observed-address service and of peer exchange; the signature of the reply's header covers them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from gossamer.protocol import limits
from gossamer.protocol.messages.frames import read_unframed, write_unframed

SIGHTING_BYTES = 256  # upper bound
PEER_LIST_BYTES = limits.MAX_LISTED * (limits.RECORD_BYTES + 3) + 16  # upper bound: each record with its tag and length, and the time


class _Reply(limits.Bounded):
    __slots__ = ()
    MOST_BYTES: ClassVar[int]

    def to_bytes(self) -> bytes:
        """Return the encoded reply."""
        return write_unframed(self)  # type: ignore[arg-type]

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a reply. Raises BadMessage. Member records in it are not parsed."""
        return read_unframed(cls, data, "a reply", cls.MOST_BYTES)


@dataclass(frozen=True, slots=True)
class Sighting(_Reply):
    """The requester's address as the replying peer observes it, and that peer's clock."""

    MOST_BYTES = SIGHTING_BYTES

    observed: str  # multiaddr of the requester's end of the connection, including its port; empty if unknown
    unix_ms: int  # the sender's clock: Unix milliseconds


@dataclass(frozen=True, slots=True)
class PeerList(_Reply):
    """Members that the sender knows, so that the requester no longer depends on one bootstrap node; and the sender's clock."""

    MOST_BYTES = PEER_LIST_BYTES

    members: tuple[bytes, ...]  # at most 16 member records as their peers signed them, including the sender's own
    unix_ms: int  # the sender's clock: Unix milliseconds
