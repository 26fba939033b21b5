"""What a peer that is asked sees of the asker: from where it comes; and what time it is here.

Not signed itself: it travels under the signature of the header of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.protocol import limits
from gossamer.protocol.messages.frames import read_alone, write_alone
from gossamer.protocol.wire import peer_pb2

SIGHTING_BYTES = 256  # at most


@dataclass(frozen=True, slots=True)
class Sighting(limits.Bounded):
    """What one peer sees of another."""

    observed: str  # multiaddr from which the asker's connection comes, a port of it included; empty where it is not known
    unix_ms: int  # what time it is here

    def to_bytes(self) -> bytes:
        """Return what is sent."""
        return write_alone(peer_pb2.Sighting(), self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Sighting:
        """Read what came. Raises BadMessage."""
        return read_alone(cls, peer_pb2.Sighting(), data, "a sighting", SIGHTING_BYTES)
