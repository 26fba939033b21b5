"""A conversation between two peers in memory: when each frame arrives, and what a cut or a death does to it.

Time is the loop's, which `virtual_time` makes virtual. Nothing here draws a random number but the network's own generator, so a seed
fixes every arrival. Not a model of congestion: each peer sends, and receives, at its own rate, one frame after the other.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.protocol.errors import PeerGone
from gossamer.protocol.identity import PeerId
from gossamer.protocol.streams.transport import Inbox, Stream

FRAMES_IN_INBOX = 4
FRAMES_ON_THE_WAY = 8
FRAMING_BYTES = 80  # of each message: libp2p's headers, the name of the handler, TCP
AGAIN_S = 0.3  # until TCP sends again what was lost


@dataclass(frozen=True, slots=True)
class Link:
    """A peer's line to the world."""

    latency_s: float = 0.0  # one way; two peers are apart by the mean of theirs
    jitter_s: float = 0.0  # up to so much more, uniformly
    bytes_per_s: float = math.inf  # each way
    silence_s: float = 30.0  # a cut line is taken for dead after so long (keep-alive)
    loss: float = 0.0  # share of what is sent that is lost and sent again, AGAIN_S later each time


@dataclass(slots=True)
class MemoryLine:
    """A peer's end of all its ways: its rates, until when they are taken, and the conversations that go over it."""

    link: Link
    sends_at_s: float = -math.inf  # busy sending until then
    receives_at_s: float = -math.inf
    num_sent: int = 0  # bytes, framing included
    num_received: int = 0
    conversations: dict[Conversation, None] = field(default_factory=dict)  # a set would be walked in the order of addresses


def crossing_s(sender: Link, receiver: Link, draw: Callable[[], float]) -> float:
    """Return the seconds that a bit takes from one peer to another, drawn anew each time."""
    took_s = (sender.latency_s + receiver.latency_s) / 2 + draw() * (sender.jitter_s + receiver.jitter_s) / 2
    loss = max(sender.loss, receiver.loss)
    while loss and draw() < loss:
        took_s += AGAIN_S
    return took_s


class MemoryWay:
    """Frames from one end of a stream to the other, in order. `inbox` is the far end's; a relay in between makes it two crossings."""

    def __init__(self, sender: MemoryLine, receiver: MemoryLine, draw: Callable[[], float], num_crossings: int = 1) -> None:
        self.inbox = Inbox(FRAMES_IN_INBOX)
        self._sender, self._receiver = sender, receiver
        self._draw = draw
        self._num_crossings = num_crossings
        self._timers: deque[tuple[asyncio.TimerHandle, Callable[[], None]]] = deque()
        self._parked: deque[Callable[[], None]] = deque()
        self._last_arrival_s = -math.inf
        self._is_cut = False
        self._moved = asyncio.Event()

    def delay_s(self) -> float:
        """Return the seconds that a bit takes, drawn anew each time."""
        return sum(crossing_s(self._sender.link, self._receiver.link, self._draw) for _ in range(self._num_crossings))

    async def room(self) -> None:
        """Wait until another frame may be sent: the far end reads, and not too much is under way."""
        while self.inbox.ended is None and len(self._timers) + len(self._parked) >= FRAMES_ON_THE_WAY:
            self._moved.clear()
            await self._moved.wait()
        await self.inbox.room()

    def send(self, num_bytes: int, arrive: Callable[[], None]) -> None:
        """Call `arrive` when so many bytes have crossed; what was sent before arrives before."""
        sender, receiver = self._sender, self._receiver
        sender.num_sent += num_bytes + FRAMING_BYTES
        receiver.num_received += num_bytes + FRAMING_BYTES
        began_s = max(asyncio.get_running_loop().time(), sender.sends_at_s)
        sender.sends_at_s = began_s + num_bytes / sender.link.bytes_per_s
        taken_s = max(began_s, receiver.receives_at_s) + num_bytes / receiver.link.bytes_per_s
        taken_s = receiver.receives_at_s = max(sender.sends_at_s, taken_s)
        self._last_arrival_s = max(self._last_arrival_s, taken_s + self.delay_s())
        self._timers.append((asyncio.get_running_loop().call_at(self._last_arrival_s, self._arrive), arrive))

    def set_cut(self, is_cut: bool) -> None:
        """Hold everything that would arrive from now on, or let it arrive."""
        self._is_cut = is_cut
        while self._parked and not self._is_cut:
            self._parked.popleft()()
        self._moved.set()

    def lose(self) -> None:
        """Lose what is under way. What is sent later arrives."""
        for timer, _ in self._timers:
            timer.cancel()
        self._timers.clear()
        self._parked.clear()
        self._moved.set()

    def _arrive(self) -> None:
        if not self._timers:
            return  # lost in this very moment
        _, arrive = self._timers.popleft()  # the first, for timers of one moment fire in any order
        if self._is_cut:
            self._parked.append(arrive)
        else:
            arrive()
            self._moved.set()


class Conversation:
    """Both ends of a stream between two peers; `peers` and `lines` are the opener's and the other's, `relay` is who stands in between."""

    def __init__(
        self, peers: tuple[PeerId, PeerId], lines: tuple[MemoryLine, MemoryLine], draw: Callable[[], float], relay: PeerId | None = None
    ) -> None:
        self.peers = peers
        self.relay = relay
        self._lines = lines
        num_crossings = 2 if relay else 1
        self._ways = (MemoryWay(lines[0], lines[1], draw, num_crossings), MemoryWay(lines[1], lines[0], draw, num_crossings))
        self.streams = (self._stream(0), self._stream(1))
        self._silence: asyncio.TimerHandle | None = None

    def _stream(self, side: int) -> Stream:
        way, inbox = self._ways[side], self._ways[1 - side].inbox

        async def write(frame: bytes) -> None:
            await way.room()
            if inbox.ended is not None:
                raise PeerGone(inbox.ended)
            way.send(len(frame), lambda: way.inbox.put(frame))

        return Stream(self.peers[1 - side], "memory", inbox, write, lambda _: self._leave(side, "the partner closed the stream"))

    def round_trip_s(self) -> float:
        """Return how long a question and its answer take, this time."""
        return self._ways[0].delay_s() + self._ways[1].delay_s()

    def begin(self) -> None:
        """Put it on both lines, each until its side has closed or died."""
        for line in self._lines:
            line.conversations[self] = None

    def die(self, peer_id: PeerId, *, is_delivered: bool) -> None:
        """End this peer's side without a word; the other side finds out when the line tells it."""
        side = self.peers.index(peer_id)
        self._ways[1 - side].inbox.end("this peer has died")
        self._ways[1 - side].lose()
        if not is_delivered:
            self._ways[side].lose()
        self._leave(side, "the partner has gone")

    def set_cut(self, is_cut: bool) -> None:
        """Cut the line, or mend it. After the silence that keep-alive allows, both sides give up."""
        if is_cut == (self._silence is not None):
            return
        for way in self._ways:
            way.set_cut(is_cut)
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        else:
            silence_s = min(line.link.silence_s for line in self._lines)
            self._silence = asyncio.get_running_loop().call_later(silence_s, self.give_up)

    def give_up(self) -> None:
        """End it on both sides: what was between them is gone."""
        for way in self._ways:
            way.lose()
            way.inbox.end("nothing was heard from the partner for too long")

    def _leave(self, side: int, why: str) -> None:
        """Tell the other side, after all that was sent, that this one has left; once."""
        if self in self._lines[side].conversations:
            del self._lines[side].conversations[self]
            self._ways[side].send(0, lambda: self._ways[side].inbox.end(why))
