"""A stranger that opens a stream and takes nothing from it, as one does whose HTTP/2 window stays at 0."""

from __future__ import annotations

import asyncio

from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Message
from gossamer.protocol.streams.transport import Gate


class Deaf:
    """The stream to it; what it says first, if anything, is `reply`."""

    transport = "memory"
    bytes_sent = 0
    bytes_received = 0

    def __init__(self, partner: PeerId, reply: Message | None = None) -> None:
        self.partner = partner
        self.reply = reply
        self.is_closed = False

    async def send(self, message: Message) -> None:
        await asyncio.Event().wait()

    async def receive(self) -> Message:
        if self.reply is None:
            await asyncio.Event().wait()
        assert self.reply is not None
        return self.reply

    def set_gates(self, up: Gate, down: Gate) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
