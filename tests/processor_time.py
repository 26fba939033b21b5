"""A bound on processor time that a pause of the machine cannot break: what is slow, is slow each time."""

from __future__ import annotations

import time
from collections.abc import Callable

NUM_TRIES = 3


def takes_at_most(limit_s: float, call: Callable[[], object]) -> bool:
    """Call until one call takes at most `limit_s` of this thread's processor time; return whether one of NUM_TRIES did.

    A single call may include a collection of garbage that other tests left.
    """
    return any(_thread_s(call) <= limit_s for _ in range(NUM_TRIES))


def _thread_s(call: Callable[[], object]) -> float:
    began_s = time.thread_time()
    call()
    return time.thread_time() - began_s
