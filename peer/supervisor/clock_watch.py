"""Notice when the machine's clock is set, by the operator or by network time: durations that are told from its times would jump too."""

from __future__ import annotations

import time

from gossamer.peer.machine.events import ClockSet

LEAST_S = 2.0  # network time corrects less than that without a jump


class ClockWatch:
    """Compares the machine's clock with one that nobody sets."""

    def __init__(self) -> None:
        self._ahead_s = _ahead_s()

    def look(self) -> ClockSet | None:
        """Return an event if the clock was set since the last look."""
        set_by_s = _ahead_s() - self._ahead_s
        if abs(set_by_s) < LEAST_S:
            return None
        self._ahead_s += set_by_s
        return ClockSet(round(set_by_s, 3))


def _ahead_s() -> float:
    """Return by how much the machine's clock is ahead of the time since it booted, in which a suspended machine counts too."""
    return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # macOS counts sleep in the second
