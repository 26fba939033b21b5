"""The network interfaces of a peer, `Transport` and `Directory`, over libp2p (`protocol/libp2p/`) or in memory (`protocol/memory/`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, Protocol

from gossamer.protocol.addresses import Route
from gossamer.protocol.errors import PeerGone, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import ANSWER_BYTES, CHUNK_BYTES
from gossamer.protocol.messages.frames import from_frame, to_frame
from gossamer.protocol.messages.messages import Chunk, ChunkBeside, Message
from gossamer.protocol.messages.records import MemberRecord

BESIDE_BYTES: Final = 16 * 1024  # a smaller chunk costs less in its frame than beside it
BULK_S: Final = 60.0  # for bytes over a bulk stream that the partner has announced; a chunk takes 8 s on the slowest line


class Inbox:
    """A bounded queue of frames between one writer and one reader on one event loop. Both are cancel-safe: no frame is lost or repeated.

    The bound gives back-pressure. After `end`, the queued frames can still be read; after `close`, they cannot.
    """

    def __init__(self, max_frames: int) -> None:
        self._max_frames = max_frames
        self._frames: deque[bytes] = deque()
        self.ended: str | None = None  # the reason why no more frames can arrive, None while they can
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def room(self) -> None:
        """Wait until the queue has room, or has ended."""
        await self._has_room.wait()

    def put(self, frame: bytes) -> None:
        """Append a frame, even beyond the bound: the writer awaits `room` first. After the end, the frame is discarded."""
        if self.ended is not None:
            return
        self._frames.append(frame)
        self._arrived.set()
        if len(self._frames) >= self._max_frames:
            self._has_room.clear()

    async def wait_for_message(self) -> bool:
        """Wait until there is a frame or the queue has ended; return whether there is a frame."""
        while not self._frames and self.ended is None:
            self._arrived.clear()
            await self._arrived.wait()
        return bool(self._frames)

    async def get(self) -> bytes:
        """Remove and return the next frame. Raises PeerGone if the queue is empty and has ended."""
        if not await self.wait_for_message():
            raise PeerGone(str(self.ended))
        frame = self._frames.popleft()
        if len(self._frames) < self._max_frames:
            self._has_room.set()
        return frame

    def end(self, why: str) -> None:
        """Accept no more frames. Queued frames can still be read. Only the first call sets the reason."""
        if self.ended is None:
            self.ended = why
        self._arrived.set()
        self._has_room.set()

    def close(self) -> None:
        """Accept no more frames and discard the queued ones."""
        self._frames.clear()
        self.end("this side closed the stream")


class Purpose(Enum):
    """The purpose of a stream. Its value is the gRPC method's name."""

    MEET = "Meet"
    FETCH = "Fetch"
    PASS = "Pass"


Gate = Callable[[int], Awaitable[None]]  # waits until a frame of this many bytes may pass


async def _open_gate(num_bytes: int) -> None:
    return


class Bulk(Protocol):
    """Carries bytes beside the messages of a stream, in their order. After a cancellation it cannot be used."""

    async def send(self, data: memoryview) -> None:
        """Send bytes; wait while the partner reads slowly. Raises PeerGone."""

    async def receive_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes. Raises PeerGone."""

    def close(self) -> None:
        """End it at once, on both sides. Idempotent."""


@dataclass(eq=False)
class Stream:
    """An ordered, reliable, bidirectional stream of messages to one partner.

    `send` and `receive` may run concurrently in two tasks. After the cancellation of either, the stream can only be closed.
    """

    partner: PeerId  # the remote peer, as authenticated by the transport
    route: Route | Literal["memory"]  # how the partner is reached, for the status page; "memory" in simulated swarms
    _inbox: Inbox  # takes the arriving frames
    _write: Callable[[bytes], Awaitable[None]]  # sends one frame, or raises PeerGone
    _on_close: Callable[[Stream], None] | None  # called once
    observed: str = ""  # the remote multiaddr; empty if the transport does not know it
    _dial: Callable[[], Awaitable[Bulk]] | None = None  # opens a bulk stream, or raises Unreachable; on the side that opened this one
    bytes_sent: int = field(default=0, init=False)  # encoded bytes handed to the transport so far
    bytes_received: int = field(default=0, init=False)  # encoded bytes taken from the transport so far
    _gates: tuple[Gate, Gate] = field(default=(_open_gate, _open_gate), init=False)
    _bulk: Bulk | None = field(default=None, init=False)

    @property
    def answer_bytes(self) -> int:
        """Return the most bytes that one request may ask for: a chunk, or more once there is a bulk stream."""
        return CHUNK_BYTES if self._bulk is None else ANSWER_BYTES

    async def open_bulk(self) -> None:
        """Open a bulk stream, on the side that opened this one. A partner that accepts none is asked for chunks."""
        if self._dial is not None and self._bulk is None:
            with suppress(Unreachable):
                self.attach(await self._dial())

    def attach(self, bulk: Bulk) -> None:
        """Use a bulk stream from now on; it ends with this stream."""
        if self._inbox.ended is None:
            self._bulk = bulk
        else:
            bulk.close()

    def set_gates(self, up: Gate, down: Gate) -> None:
        """Make each frame wait for a gate from now on: outbound frames for `up`, inbound frames for `down`."""
        self._gates = (up, down)

    async def send(self, message: Message) -> None:
        """Send one message; wait while the partner reads slowly. Raises PeerGone if the stream has ended."""
        frame = to_frame(message)
        await self._gates[0](len(frame))
        if self._inbox.ended is not None:
            raise PeerGone(self._inbox.ended)
        await self._write(frame)
        self.bytes_sent += len(frame)

    async def send_chunk(self, chunk: Chunk) -> None:
        """Send a chunk as `send` does: a large one over the bulk stream, if there is one. The partner must know ChunkBeside."""
        if self._bulk is None or len(chunk.data) < BESIDE_BYTES:
            await self.send(chunk)
            return
        await self.send(ChunkBeside(chunk.part, chunk.offset, len(chunk.data)))
        await self.send_bytes(memoryview(chunk.data))

    async def receive(self) -> Message:
        """Return the partner's next message. Raises PeerGone if the stream has ended, BadMessage or Refused if the frame is invalid."""
        frame = await self._inbox.get()
        await self._gates[1](len(frame))
        self.bytes_received += len(frame)
        message = from_frame(frame)
        if not isinstance(message, ChunkBeside):
            return message
        data = bytearray(message.num_bytes)
        await self.receive_into(memoryview(data))
        return Chunk(message.part, message.offset, bytes(data))

    async def send_bytes(self, data: memoryview) -> None:
        """Send bytes over the bulk stream. They must not change before the partner has them. Raises PeerGone, also where there is none."""
        await self._gates[0](len(data))
        bulk = self._open_bulk
        with self._ending_with_bulk():
            await bulk.send(data)
        self.bytes_sent += len(data)

    async def receive_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes of the bulk stream. Raises PeerGone, also where there is none."""
        bulk = self._open_bulk
        with self._ending_with_bulk():
            async with asyncio.timeout(BULK_S):
                await bulk.receive_into(target)
        await self._gates[1](len(target))
        self.bytes_received += len(target)

    @contextmanager
    def _ending_with_bulk(self) -> Iterator[None]:
        """End the stream where its bulk stream breaks or falls silent: without those bytes no later message makes sense."""
        try:
            yield
        except (PeerGone, TimeoutError) as error:
            why = str(error) or "the bulk stream fell silent"
            self._inbox.end(why)
            raise PeerGone(why) from error

    @property
    def _open_bulk(self) -> Bulk:
        if self._bulk is None:
            raise PeerGone("there is no bulk stream")
        return self._bulk

    async def wait_for_message(self) -> bool:
        """Wait until a message has arrived or the stream has ended; return whether a message has arrived."""
        return await self._inbox.wait_for_message()

    def close(self) -> None:
        """Close the stream in both directions. Messages sent before are still delivered if possible. Idempotent."""
        self._inbox.close()
        if self._bulk is not None:
            self._bulk.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            self._write = _write_to_closed  # frees the transport's objects even if this stream is still referenced
            on_close(self)


async def _write_to_closed(frame: bytes) -> None:
    raise PeerGone("this side closed the stream")


StreamHandler = Callable[[Purpose, Stream], Awaitable[None]]


class Transport(Protocol):
    """Opens streams to partners. An implementation passes inbound streams to the handler given at its construction."""

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        """Open a stream to `partner`. `addresses` are multiaddrs to try, may be empty. The caller sets the timeout. Raises Unreachable."""


class Directory(Protocol):
    """Publishes and finds member records. Records are hints: each is signed, but only a connection proves that its peer is alive."""

    async def announce(self, record: MemberRecord) -> None:
        """Publish this peer's own record, which replaces its last one. Raises TransportError if no directory node stored it."""

    async def members(self) -> list[MemberRecord]:
        """Return the verified, unexpired records that can be found now, with or without this peer's own."""
