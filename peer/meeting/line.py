"""What this peer's line carries, as its meetings find out and its operator allows: bytes a second, each way.

A payload that takes seconds measures the line; one that takes a moment measures the partner's trainer and the way there, so what is said
here is less than the line has, never more. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from enum import Enum, auto

from gossamer.protocol.limits import LEAST_BYTES_PER_S, SLOWEST_BYTES_PER_S
from gossamer.protocol.messages.messages import Chunk, Commit, Message, Part, Verdict

REMEMBERED = 16  # payloads, each way
QUANTILE = 0.75  # of the rates of these: a slow partner says little about our line


def transfer_s(num_bytes: int) -> float:
    """Return how long so many bytes may take on the slowest line that peers wait for."""
    return num_bytes / SLOWEST_BYTES_PER_S


class Way(Enum):
    """A direction, seen from here."""

    UP = auto()
    DOWN = auto()


class Line:
    """The rates of the payloads that were sent and received lately."""

    def __init__(self) -> None:
        self._num_active = 0
        self._rates: dict[Way, deque[float]] = {way: deque(maxlen=REMEMBERED) for way in Way}
        self.limits = dict.fromkeys(Way, math.inf)
        """What the operator allows, each way, in bytes a second."""

    def begin(self) -> int:
        """Note that payloads are being exchanged in a meeting; return in how many they are now."""
        self._num_active += 1
        return self._num_active

    def end(self) -> None:
        """Note that one of these exchanges is over."""
        self._num_active -= 1

    def carried(self, way: Way, num_bytes: int, seconds: float, num_sharing: int) -> None:
        """Note that a payload took so long; `num_sharing` is in how many meetings the line was busy at its beginning."""
        if num_bytes:
            self._rates[way].append(num_bytes * (num_sharing + self._num_active) / 2 / max(seconds, 1e-6))

    def bytes_per_s(self, way: Way) -> float:
        """Return what the line carries that way, and may carry; 0 when nothing is known yet."""
        rates = sorted(self._rates[way])
        if not rates:
            return self.limits[way] if math.isfinite(self.limits[way]) else 0.0
        return min(self.limits[way], rates[math.ceil(QUANTILE * len(rates)) - 1])

    @property
    def max_meetings(self) -> float:
        """Return how many meetings at once the limits leave time enough for: partners wait for the slowest rate, not longer."""
        return max(1.0, min(self.limits.values()) / LEAST_BYTES_PER_S)

    @property
    def slower_bytes_per_s(self) -> float:
        """Return what the slower way carries; 0 as long as one of the two is not known."""
        return min(self.bytes_per_s(way) for way in Way)


class Exchange:
    """Times the two payloads of one meeting, from the moment at which ours may leave: both leave at about the same time."""

    def __init__(self, line: Line, payload_bytes: int) -> None:
        self._line = line
        self._left = self._payload_bytes = payload_bytes  # both sides' payloads have the same size
        self._num_sharing = line.begin()
        self._is_up = self._is_over = False
        self._started_s = asyncio.get_running_loop().time()

    def heard(self, message: Message) -> None:
        """Learn from what the partner says: its payload is here, or ours is there."""
        if isinstance(message, Chunk) and message.part is Part.PAYLOAD and self._left:
            self._left -= len(message.data)
            if not self._left:
                self._carried(Way.DOWN)
        elif isinstance(message, Verdict | Commit) and not self._is_up:
            self._is_up = True
            self._carried(Way.UP)

    def end(self) -> None:
        """The line is not busy with this meeting any more."""
        if not self._is_over:
            self._is_over = True
            self._line.end()

    def _carried(self, way: Way) -> None:
        self._line.carried(way, self._payload_bytes, asyncio.get_running_loop().time() - self._started_s, self._num_sharing)
        if self._is_up and not self._left:
            self.end()
