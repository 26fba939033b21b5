"""Waiting, with a deadline, for what another thread, process or task does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 30.0
_FIRST_S, _LONGEST_S = 0.005, 0.1  # pauses grow with the wait: a look at another process costs both processes time


def wait_until(look: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Look again and again until there is something; fails when there is nothing in time."""
    began_s = time.monotonic()
    while not (seen := look()):
        pause_s = _pause_s(began_s, what, deadline_s)
        time.sleep(pause_s)
    return seen


async def eventually(look: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """The same, letting the event loop run."""
    began_s = time.monotonic()
    while not (seen := look()):
        pause_s = _pause_s(began_s, what, deadline_s)
        await asyncio.sleep(pause_s)
    return seen


def _pause_s(began_s: float, what: str, deadline_s: float) -> float:
    waited_s = time.monotonic() - began_s
    assert waited_s < deadline_s, f"no {what} in {deadline_s:.0f} s"
    return min(max(_FIRST_S, waited_s / 20), _LONGEST_S)
