"""The reply of the observed-address service: the requester's address as the replying peer observes it, and that peer's clock.

It has no signature of its own: the signature of the reply's header covers it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.protocol import limits
from gossamer.protocol.messages.frames import read_alone, write_alone
from gossamer.protocol.wire import peer_pb2

SIGHTING_BYTES = 256  # upper bound


@dataclass(frozen=True, slots=True)
class Sighting(limits.Bounded):
    """The requester's observed address, and the time."""

    observed: str  # multiaddr of the requester's end of the connection, including its port; empty if unknown
    unix_ms: int  # the sender's clock: Unix milliseconds

    def to_bytes(self) -> bytes:
        """Return the encoded reply."""
        return write_alone(peer_pb2.Sighting(), self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Sighting:
        """Parse a reply. Raises BadMessage."""
        return read_alone(cls, peer_pb2.Sighting(), data, "a sighting", SIGHTING_BYTES)
