"""How long a thread was ready to run while the machine ran something else: time that is nobody's fault in the swarm."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress


def queued_clock() -> Callable[[], float]:
    """Return a clock, in seconds, that goes on only while the calling thread stands in the queue for a processor.

    The kernel counts it; where it does not (anywhere but on Linux), the clock stands still. May be read from any thread.
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
