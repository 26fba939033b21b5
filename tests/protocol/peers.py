"""Peers and messages by number, for tests that need many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from gossamer.protocol.errors import PeerGone
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.frames import to_frame
from gossamer.protocol.messages.messages import Chunk, Part
from gossamer.protocol.streams.transport import Purpose, Stream


def seeded(number: int) -> Identity:
    return Identity(number.to_bytes(32, "little"))


def chunk(number: int, num_bytes: int = 1) -> Chunk:
    """Return a message that contains this number."""
    return Chunk(Part.PAYLOAD, number, number.to_bytes(4, "little") * (num_bytes // 4) or b"x")


async def number_of(stream: Stream) -> int:
    """Receive a message from `chunk` and return its number."""
    message = await stream.receive()
    assert isinstance(message, Chunk)
    return message.offset


@dataclass(frozen=True)
class Raw:
    """Raw bytes, valid frame or not, that can be sent like a message after `send_raw`."""

    frame: bytes


def send_raw(patch: pytest.MonkeyPatch) -> None:
    """Let streams send `Raw`, so that a test can act as a faulty partner."""

    def write(message: Any) -> bytes:
        return message.frame if isinstance(message, Raw) else to_frame(message)

    patch.setattr("gossamer.protocol.streams.transport.to_frame", write)


async def nobody(purpose: Purpose, stream: Stream) -> None:
    raise AssertionError("nobody calls this peer")


async def echo(purpose: Purpose, stream: Stream) -> None:
    """Echo messages until the partner closes the stream."""
    while True:
        await stream.send(await stream.receive())


async def say(stream: Stream, number: int) -> None:
    """Send a number to a partner that echoes, and check that it comes back."""
    await stream.send(chunk(number))
    assert await number_of(stream) == number


async def expect_over(stream: Stream) -> None:
    """Check that no message can be received or sent any more."""
    with pytest.raises(PeerGone):
        await stream.receive()
    with pytest.raises(PeerGone):
        await stream.send(chunk(0))
