"""In-memory streams between two peers, each sending and receiving at its own rate; the network's seed determines every arrival."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.protocol.errors import PeerGone
from gossamer.protocol.identity import PeerId
from gossamer.protocol.streams.transport import Inbox, Stream
from gossamer.protocol.tasks import loop_s

FRAMES_IN_INBOX = 4
FRAMES_IN_FLIGHT = 8
FRAMING_BYTES = 80  # overhead per message: libp2p's headers, the handler's name, TCP
RETRANSMIT_S = 0.3  # delay until TCP retransmits a lost segment


@dataclass(frozen=True, slots=True)
class Link:
    """The properties of a peer's internet connection."""

    latency_s: float = 0.0  # one way; between two peers, the mean of their latencies
    jitter_s: float = 0.0  # largest additional latency, drawn uniformly
    bytes_per_s: float = math.inf  # in each direction
    silence_s: float = 30.0  # keep-alive timeout: a partitioned stream breaks after this long
    loss: float = 0.0  # probability that a frame is lost; it is retransmitted RETRANSMIT_S later


@dataclass(slots=True)
class MemoryLine:
    """The state of a peer's internet connection: when it is free to send and to receive, byte counts, and open conversations."""

    link: Link
    sends_at_s: float = -math.inf  # loop time until which it is busy sending
    receives_at_s: float = -math.inf  # loop time until which it is busy receiving
    num_sent: int = 0  # bytes, framing included
    num_received: int = 0  # bytes, framing included
    conversations: dict[Conversation, None] = field(default_factory=dict)  # not a set: its order depends on object addresses


def crossing_s(sender: Link, receiver: Link, draw: Callable[[], float]) -> float:
    """Draw the one-way delay between two peers, in seconds."""
    delay_s = (sender.latency_s + receiver.latency_s) / 2 + draw() * (sender.jitter_s + receiver.jitter_s) / 2
    loss = max(sender.loss, receiver.loss)
    while loss and draw() < loss:
        delay_s += RETRANSMIT_S
    return delay_s


class MemoryChannel:
    """One direction of a stream: it delivers frames in order. `inbox` is the receiver's. Over a relay, `num_crossings` is 2."""

    def __init__(self, sender: MemoryLine, receiver: MemoryLine, draw: Callable[[], float], num_crossings: int = 1) -> None:
        self.inbox = Inbox(FRAMES_IN_INBOX)
        self._sender, self._receiver = sender, receiver
        self._draw = draw
        self._num_crossings = num_crossings
        self._timers: deque[tuple[asyncio.TimerHandle, Callable[[], None]]] = deque()
        self._parked: deque[Callable[[], None]] = deque()
        self._last_arrival_s = -math.inf
        self._is_cut = False
        self._changed = asyncio.Event()

    def delay_s(self) -> float:
        """Draw the one-way delay in seconds."""
        return sum(crossing_s(self._sender.link, self._receiver.link, self._draw) for _ in range(self._num_crossings))

    async def room(self) -> None:
        """Wait until another frame may be sent: fewer than FRAMES_IN_FLIGHT are in flight, and the receiver's inbox has room.

        Frames to a receiver that has closed its end are in flight too, until the sender learns of it: else a writer would never yield.
        """
        while len(self._timers) + len(self._parked) >= FRAMES_IN_FLIGHT:
            self._changed.clear()
            await self._changed.wait()
        await self.inbox.room()

    def send(self, num_bytes: int, arrive: Callable[[], None]) -> None:
        """Schedule `arrive` for the time at which `num_bytes` have been transferred, after everything that was sent before."""
        sender, receiver = self._sender, self._receiver
        sender.num_sent += num_bytes + FRAMING_BYTES
        receiver.num_received += num_bytes + FRAMING_BYTES
        began_s = max(loop_s(), sender.sends_at_s)
        sender.sends_at_s = began_s + num_bytes / sender.link.bytes_per_s
        taken_s = max(began_s, receiver.receives_at_s) + num_bytes / receiver.link.bytes_per_s
        taken_s = receiver.receives_at_s = max(sender.sends_at_s, taken_s)
        self._last_arrival_s = max(self._last_arrival_s, taken_s + self.delay_s())
        self._timers.append((asyncio.get_running_loop().call_at(self._last_arrival_s, self._arrive), arrive))

    def set_cut(self, is_cut: bool) -> None:
        """Hold back all arrivals from now on, or deliver everything that was held back."""
        self._is_cut = is_cut
        while self._parked and not self._is_cut:
            self._parked.popleft()()
        self._changed.set()

    def lose(self) -> None:
        """Discard every frame in flight. Frames that are sent later arrive."""
        for timer, _ in self._timers:
            timer.cancel()
        self._timers.clear()
        self._parked.clear()
        self._changed.set()

    def _arrive(self) -> None:
        if not self._timers:
            return  # `lose` discarded the frame in the same loop iteration
        _, arrive = self._timers.popleft()  # the oldest: timers with equal times fire in any order
        if self._is_cut:
            self._parked.append(arrive)
        else:
            arrive()
            self._changed.set()


class MemoryBulk:
    """One end of a bulk stream."""

    def __init__(self, outward: MemoryChannel, inward: MemoryChannel) -> None:
        self._outward, self._inward = outward, inward
        self._rest = b""  # of what has arrived

    async def send(self, data: memoryview) -> None:
        """Send bytes; wait while the partner reads slowly. Raises PeerGone."""
        await self._outward.room()
        if self._outward.inbox.ended is not None:
            raise PeerGone(self._outward.inbox.ended)
        sent = bytes(data)
        self._outward.send(len(sent), lambda: self._outward.inbox.put(sent))

    async def receive_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes. Raises PeerGone."""
        while len(target):
            self._rest = self._rest or await self._inward.inbox.get()
            count = min(len(self._rest), len(target))
            target[:count], self._rest, target = self._rest[:count], self._rest[count:], target[count:]

    def close(self) -> None:
        """End it at once, on both sides. Idempotent."""
        for channel in (self._outward, self._inward):
            channel.lose()
            channel.inbox.end("the bulk stream ended")


class Conversation:
    """Both ends of a stream, over `relay` if there is one. `peers` and `lines` hold the initiator's, then the responder's."""

    def __init__(
        self, peers: tuple[PeerId, PeerId], lines: tuple[MemoryLine, MemoryLine], draw: Callable[[], float], relay: PeerId | None = None
    ) -> None:
        self.peers = peers
        self.relay = relay
        self._lines = lines
        self._draw = draw
        self._channels = self._channel_pair()
        self._bulk_channels: tuple[MemoryChannel, ...] = ()
        self.streams = (self._stream(0), self._stream(1))
        self._silence: asyncio.TimerHandle | None = None

    def _stream(self, side: int) -> Stream:
        channel, inbox = self._channels[side], self._channels[1 - side].inbox

        async def write(frame: bytes) -> None:
            await channel.room()
            if inbox.ended is not None:
                raise PeerGone(inbox.ended)
            channel.send(len(frame), lambda: channel.inbox.put(frame))

        dial = self._open_bulk if side == 0 else None
        return Stream(
            self.peers[1 - side], "memory", inbox, write, lambda _: self._leave(side, "the partner closed the stream"), _dial=dial
        )

    def _channel_pair(self) -> tuple[MemoryChannel, MemoryChannel]:
        (one, other), num_crossings = self._lines, 2 if self.relay else 1
        return MemoryChannel(one, other, self._draw, num_crossings), MemoryChannel(other, one, self._draw, num_crossings)

    async def _open_bulk(self) -> MemoryBulk:
        await asyncio.sleep(self.round_trip_s())
        one, other = self._bulk_channels = self._channel_pair()
        self.streams[1].attach(MemoryBulk(other, one))
        return MemoryBulk(one, other)

    def round_trip_s(self) -> float:
        """Draw a round-trip time in seconds."""
        return self._channels[0].delay_s() + self._channels[1].delay_s()

    def begin(self) -> None:
        """Register the conversation on both lines. Each line keeps it until its peer closes the stream or crashes."""
        for line in self._lines:
            line.conversations[self] = None

    def die(self, peer_id: PeerId, *, is_delivered: bool) -> None:
        """End the stream because `peer_id` crashed. Its frames in flight are lost unless `is_delivered`."""
        side = self.peers.index(peer_id)
        for channel in self._bulk_channels:
            channel.lose()
            channel.inbox.end("a peer crashed")
        self._channels[1 - side].inbox.end("this peer crashed")
        self._channels[1 - side].lose()
        if not is_delivered:
            self._channels[side].lose()
        self._leave(side, "the partner crashed")

    def set_cut(self, is_cut: bool) -> None:
        """Partition the two peers, or reconnect them. Both streams break after the keep-alive timeout."""
        if is_cut == (self._silence is not None):
            return
        for channel in (*self._channels, *self._bulk_channels):
            channel.set_cut(is_cut)
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        else:
            silence_s = min(line.link.silence_s for line in self._lines)
            self._silence = asyncio.get_running_loop().call_later(silence_s, self.give_up)

    def give_up(self) -> None:
        """Break the stream on both sides. All frames in flight are lost."""
        for channel in (*self._channels, *self._bulk_channels):
            channel.lose()
            channel.inbox.end("the partner was silent for too long")

    def _leave(self, side: int, why: str) -> None:
        """End the other side's inbox after everything that this side has sent. Idempotent."""
        if self in self._lines[side].conversations:
            del self._lines[side].conversations[self]
            self._channels[side].send(0, lambda: self._channels[side].inbox.end(why))
