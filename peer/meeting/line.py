"""The throughput of this peer's line, measured by its meetings and limited by its operator: bytes per second in each direction.

A payload that takes seconds measures the line. A small one measures the partner's trainer and the latency, so a rate here may be too low,
never too high. Belongs to one event loop.
"""

from __future__ import annotations

import math
from collections import deque
from enum import Enum, auto

from gossamer.protocol.limits import LEAST_BYTES_PER_S, SLOWEST_BYTES_PER_S
from gossamer.protocol.messages.messages import Chunk, Commit, Message, Part, Verdict
from gossamer.protocol.tasks import loop_s

REMEMBERED = 16  # payloads in each direction
QUANTILE = 0.75  # of their rates: a slow partner hardly measures our line


def transfer_s(num_bytes: int) -> float:
    """Return how long so many bytes take on the slowest line that peers wait for."""
    return num_bytes / SLOWEST_BYTES_PER_S


class Direction(Enum):
    """A direction, seen from here."""

    UP = auto()
    DOWN = auto()


class Line:
    """The rates of recent payloads."""

    def __init__(self) -> None:
        self._num_active = 0
        self._rates: dict[Direction, deque[float]] = {direction: deque(maxlen=REMEMBERED) for direction in Direction}
        self.limits = dict.fromkeys(Direction, math.inf)
        """The operator's limits in bytes per second."""
        self.probed_bytes_per_s = 0.0
        """In a staged run, the rate of the slower direction by an echo; 0: not known yet."""

    def begin(self) -> int:
        """Note that a meeting exchanges payloads now; return the number of such meetings."""
        self._num_active += 1
        return self._num_active

    def end(self) -> None:
        """Note that one of these meetings has stopped exchanging."""
        self._num_active -= 1

    def carried(self, direction: Direction, num_bytes: int, seconds: float, num_sharing: int) -> None:
        """Note that a payload took so long; `num_sharing`: the number of meetings on the line when it began."""
        if num_bytes:
            self._rates[direction].append(num_bytes * (num_sharing + self._num_active) / 2 / max(seconds, 1e-6))

    def bytes_per_s(self, direction: Direction) -> float:
        """Return the line's rate in a direction, within the operator's limit; 0 if it is unknown."""
        rates = sorted(self._rates[direction])
        if not rates:
            return self.limits[direction] if math.isfinite(self.limits[direction]) else 0.0
        return min(self.limits[direction], rates[math.ceil(QUANTILE * len(rates)) - 1])

    @property
    def max_meetings(self) -> float:
        """Return how many concurrent meetings the limits allow, if each needs the least rate that partners wait for."""
        return max(1.0, min(self.limits.values()) / LEAST_BYTES_PER_S)

    @property
    def feeding_bytes_per_s(self) -> float:
        """Return what the line and the limits allow hops, in the slower direction; 0: not known yet."""
        known = [rate for rate in (self.probed_bytes_per_s, *self.limits.values()) if rate and math.isfinite(rate)]
        return min(known, default=0.0)

    @property
    def slower_bytes_per_s(self) -> float:
        """Return the rate of the slower direction; 0 if either is unknown."""
        return min(self.bytes_per_s(direction) for direction in Direction)


class Exchange:
    """Measures the two payloads of one meeting, from when ours may be sent: both are sent at about the same time."""

    def __init__(self, line: Line, payload_bytes: int) -> None:
        self._line = line
        self._left = self._payload_bytes = payload_bytes  # both sides' payloads have the same size
        self._num_sharing = line.begin()
        self._is_up = self._is_over = False
        self._started_s = loop_s()

    def received(self, message: Message) -> None:
        """Take in a message of the partner: its payload is complete, or ours has arrived."""
        if isinstance(message, Chunk) and message.part is Part.PAYLOAD and self._left:
            self._left -= len(message.data)
            if not self._left:
                self._carried(Direction.DOWN)
        elif isinstance(message, Verdict | Commit) and not self._is_up:
            self._is_up = True
            self._carried(Direction.UP)

    def end(self) -> None:
        """Note that the payloads are exchanged, or the meeting is over."""
        if not self._is_over:
            self._is_over = True
            self._line.end()

    def _carried(self, direction: Direction) -> None:
        self._line.carried(direction, self._payload_bytes, loop_s() - self._started_s, self._num_sharing)
        if self._is_up and not self._left:
            self.end()
