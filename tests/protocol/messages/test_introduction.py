"""The encoding of peer-exchange replies, which are untrusted input."""

from __future__ import annotations

import pytest

from gossamer.protocol.errors import BadMessage
from gossamer.protocol.limits import INTRODUCED, RECORD_BYTES
from gossamer.protocol.messages.introduction import INTRODUCTION_BYTES, Introduction
from gossamer.protocol.wire import peer_pb2
from tests.protocol.samples import RECORD

NAMED = Introduction((RECORD.to_bytes(),), 1_800_000_000_000)


def test_an_introduction_survives_a_round_trip() -> None:
    assert Introduction.from_bytes(NAMED.to_bytes()) == NAMED
    largest = Introduction((b"r" * RECORD_BYTES,) * INTRODUCED, NAMED.unix_ms)
    assert len(largest.to_bytes()) <= INTRODUCTION_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        bytes(INTRODUCTION_BYTES + 1),
        peer_pb2.Introduction(members=[b""] * (INTRODUCED + 1)).SerializeToString(),
        peer_pb2.Introduction(members=[b"r" * (RECORD_BYTES + 1)]).SerializeToString(),
        peer_pb2.Introduction(unix_ms=1 << 60).SerializeToString(),
    ],
    ids=["noise", "too large", "too many", "a large record", "a far time"],
)
def test_invalid_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(BadMessage):
        Introduction.from_bytes(data)
