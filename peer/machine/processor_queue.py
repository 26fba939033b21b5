"""The time that a thread was ready to run and waited for a processor. Timeouts exclude it: the partner did not cause it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress


def queued_clock() -> Callable[[], float]:
    """Return a clock, in seconds, that advances only while the calling thread waits for a processor.

    Reads a counter of the Linux kernel; on other systems the clock stands still. May be read from any thread.
    """
    try:
        file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    except OSError:
        return lambda: 0.0

    def queued_s() -> float:
        with suppress(OSError, IndexError, ValueError):  # the thread has ended
            return int(os.pread(file, 100, 0).split()[1]) / 1e9
        return 0.0

    weakref.finalize(queued_s, os.close, file)
    return queued_s
