"""The two seams between a peer and the world: `Transport` (streams to partners) and `Directory` (who is there).

Each has exactly two implementations: over libp2p (`protocol/libp2p/`) and in memory (`protocol/memory/`), where whole swarms live in
virtual time. Nothing above these interfaces knows which one it drives.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Literal, Protocol

from gossamer.protocol.addresses import Route
from gossamer.protocol.errors import PeerGone
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.frames import from_frame, to_frame
from gossamer.protocol.messages.messages import Message
from gossamer.protocol.messages.records import MemberRecord


class Inbox:
    """A queue of frames between one writer and one reader on the same loop. Both are cancel-safe: nothing is lost or doubled.

    Bounded, so that a partner who sends faster than we read has to wait. The partner's end lets what came before be read, ours nothing.
    """

    def __init__(self, max_frames: int) -> None:
        self._max_frames = max_frames
        self._frames: deque[bytes] = deque()
        self._end: str | None = None
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def ended(self) -> str | None:
        """Why nothing more will come, None while something may."""
        return self._end

    async def room(self) -> None:
        """Wait until another frame may be put, or none is wanted any more."""
        await self._has_room.wait()

    def put(self, frame: bytes) -> None:
        """Add a frame, above the bound too: the writer waits for `room` first. After the end it is dropped."""
        if self._end is not None:
            return
        self._frames.append(frame)
        self._arrived.set()
        if len(self._frames) >= self._max_frames:
            self._has_room.clear()

    async def arrived(self) -> bool:
        """Wait until there is a frame to read, or never will be; return whether there is one."""
        await self._arrived.wait()
        return bool(self._frames)

    async def get(self) -> bytes:
        """Return the next frame. Raises PeerGone when none is left and none will come."""
        while not self._frames:
            if self._end is not None:
                raise PeerGone(self._end)
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._frames.popleft()
        if len(self._frames) < self._max_frames:
            self._has_room.set()
        return frame

    def end(self, why: str) -> None:
        """Let nothing more in; what is here can still be read. The first reason given stays."""
        if self._end is None:
            self._end = why
        self._arrived.set()
        self._has_room.set()

    def close(self) -> None:
        """Let nothing more in and throw away what is here."""
        self._frames.clear()
        self.end("this side closed the stream")


class Purpose(Enum):
    """What a stream is for; the value is the gRPC method."""

    MEET = "Meet"
    FETCH = "Fetch"


Gate = Callable[[int], Awaitable[None]]
"""Lets a frame of so many bytes pass when its time has come."""


class Stream:
    """One conversation with one partner: ordered, reliable, both ways until it breaks.

    `send` and `receive` may run at the same time in two tasks; both are cancel-safe in that a cancelled stream can only be closed.
    A transport makes it: `write` sends one frame or raises PeerGone, frames that arrive go into `inbox`, and `on_close` is called once.
    """

    def __init__(
        self,
        partner: PeerId,
        route: Route | Literal["memory"],
        inbox: Inbox,
        write: Callable[[bytes], Awaitable[None]],
        on_close: Callable[[Stream], None],
        observed: str = "",
    ) -> None:
        self.partner = partner
        """The other end, as the transport proved it (not as it claims)."""
        self.observed = observed
        """The multiaddr at the other end; empty where the transport does not know."""
        self.route = route
        """How the partner is reached, for the status page; "memory" in simulated swarms."""
        self.bytes_sent = 0
        """Serialized bytes handed to the transport so far."""
        self.bytes_received = 0
        """Serialized bytes taken from the transport so far."""
        self._inbox = inbox
        self._write = write
        self._gates: tuple[Gate, Gate] = (_open_gate, _open_gate)
        self._on_close: Callable[[Stream], None] | None = on_close

    def pass_gates(self, up: Gate, down: Gate) -> None:
        """Have every frame wait at a gate from now on: what is sent at `up`, what is received at `down`."""
        self._gates = (up, down)

    async def send(self, message: Message) -> None:
        """Send one message; wait while the partner is slow to read. Raises PeerGone when the stream has ended."""
        frame = to_frame(message)
        await self._gates[0](len(frame))
        if self._inbox.ended is not None:
            raise PeerGone(self._inbox.ended)
        await self._write(frame)
        self.bytes_sent += len(frame)

    async def receive(self) -> Message:
        """Return the partner's next message. Raises PeerGone when the stream has ended, BadMessage when what came is not a message."""
        frame = await self._inbox.get()
        await self._gates[1](len(frame))
        self.bytes_received += len(frame)
        return from_frame(frame)

    async def arrived(self) -> bool:
        """Wait until the first message is there, or the stream has ended; return whether there is one."""
        return await self._inbox.arrived()

    async def close(self) -> None:
        """End the stream in both directions; what was sent before is still delivered if the network allows. Idempotent."""
        self.hang_up()

    def hang_up(self) -> None:
        """Close, for who cannot wait."""
        self._inbox.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            self._write = _nowhere  # what carried the stream is freed, whoever still holds it
            on_close(self)


async def _open_gate(num_bytes: int) -> None:
    return


async def _nowhere(frame: bytes) -> None:
    raise PeerGone("this side closed the stream")


StreamHandler = Callable[[Purpose, Stream], Awaitable[None]]


class Transport(Protocol):
    """Open streams to partners, and hand inbound ones to the handler given at construction."""

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        """Open a stream, bounded by the caller's time-out; `addresses` are hints (multiaddrs), may be empty. Raises Unreachable."""


class Directory(Protocol):
    """Who may be there. A hint, never truth: every record is signed, and identity is proven on connect."""

    async def announce(self, record: MemberRecord) -> None:
        """Publish this peer's own record; a later call replaces it. Raises TransportError when nobody took it."""

    async def members(self) -> list[MemberRecord]:
        """Return the verified, unexpired records that can be found now, own record included or not."""
