"""The encoding of observed-address replies, which are untrusted input."""

from __future__ import annotations

import pytest

from gossamer.protocol.errors import BadMessage
from gossamer.protocol.limits import ADDRESS_CHARS
from gossamer.protocol.messages.sighting import SIGHTING_BYTES, Sighting
from gossamer.protocol.wire import peer_pb2

SEEN = Sighting("/ip4/203.0.113.7/tcp/4001", 1_800_000_000_000)


def test_a_sighting_survives_a_round_trip() -> None:
    assert Sighting.from_bytes(SEEN.to_bytes()) == SEEN
    longest = Sighting("x" * ADDRESS_CHARS, SEEN.unix_ms)
    assert len(longest.to_bytes()) <= SIGHTING_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        bytes(SIGHTING_BYTES + 1),
        peer_pb2.Sighting(observed="x" * (ADDRESS_CHARS + 1)).SerializeToString(),
        peer_pb2.Sighting(unix_ms=1 << 60).SerializeToString(),
    ],
    ids=["noise", "too large", "a long address", "a far time"],
)
def test_invalid_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(BadMessage):
        Sighting.from_bytes(data)
