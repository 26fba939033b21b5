"""How a frame travels between two peers in memory: when it arrives, and what a cut or a death does to it.

Time is the loop's, which the tests make virtual. Nothing here draws a random number but the network's own generator, so a seed
fixes every arrival. Not a model of congestion: each peer sends, and receives, at its own rate, one frame after the other.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.streams.inbox import Inbox

FRAMES_IN_INBOX = 4
FRAMES_ON_THE_WAY = 8


@dataclass(frozen=True, slots=True)
class Link:
    """A peer's line to the world."""

    latency_s: float = 0.0  # one way; two peers are apart by the mean of theirs
    jitter_s: float = 0.0  # up to so much more, uniformly
    bytes_per_s: float = math.inf  # each way
    silence_s: float = 30.0  # a cut line is taken for dead after so long (keep-alive)


@dataclass(slots=True)
class Doom:
    """The death of a peer at its k-th message, counted over all its streams from now on."""

    sent: int | None = None  # dies when it sends its k-th message
    received: int | None = None  # dies when its k-th message arrives, unread
    is_delivered: bool = False  # what it had sent still arrives; otherwise what is under way is lost, the k-th too


@dataclass(slots=True)
class Line:
    """One end of all the ways of a peer: its rates, its counts and its end."""

    link: Link
    sends_at_s: float = -math.inf  # busy sending until then
    receives_at_s: float = -math.inf
    num_sent: int = 0
    num_received: int = 0
    dooms: list[Doom] = field(default_factory=list)

    def doom_at_send(self) -> Doom | None:
        """Count one more message sent; return the doom that this brings."""
        self.num_sent += 1
        return next((doom for doom in self.dooms if doom.sent == self.num_sent), None)

    def doom_at_receive(self) -> Doom | None:
        """Count one more message received; return the doom that this brings."""
        self.num_received += 1
        return next((doom for doom in self.dooms if doom.received == self.num_received), None)


class Way:
    """Frames from one end of a stream to the other, in order. `inbox` is the far end's."""

    def __init__(self, sender: Line, receiver: Line, draw: Callable[[], float]) -> None:
        self.inbox = Inbox(FRAMES_IN_INBOX)
        self._sender, self._receiver = sender, receiver
        self._draw = draw
        self._timers: deque[tuple[asyncio.TimerHandle, Callable[[], None]]] = deque()
        self._parked: deque[Callable[[], None]] = deque()
        self._last_arrival_s = -math.inf
        self._is_cut = False
        self._moved = asyncio.Event()

    def delay_s(self) -> float:
        """Return the seconds that a bit takes, drawn anew each time."""
        a, b = self._sender.link, self._receiver.link
        return (a.latency_s + b.latency_s) / 2 + self._draw() * (a.jitter_s + b.jitter_s) / 2

    async def room(self) -> None:
        """Wait until another frame may be sent: the far end reads, and not too much is under way."""
        while self.inbox.ended is None and len(self._timers) + len(self._parked) >= FRAMES_ON_THE_WAY:
            self._moved.clear()
            await self._moved.wait()
        await self.inbox.room()

    def send(self, num_bytes: int, arrive: Callable[[], None]) -> None:
        """Call `arrive` when so many bytes have crossed; what was sent before arrives before."""
        sender, receiver = self._sender, self._receiver
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
