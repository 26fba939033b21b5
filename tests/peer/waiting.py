"""Waiting, with a deadline, for what another thread, process or task does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 30.0
_LOOK_S = 0.005


def wait_until(look: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Look again and again until there is something; fails when there is nothing in time."""
    until_s = time.monotonic() + deadline_s
    while not (seen := look()):
        assert time.monotonic() < until_s, f"no {what} in {deadline_s:.0f} s"
        time.sleep(_LOOK_S)
    return seen


async def eventually(look: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """The same, letting the event loop run."""
    until_s = time.monotonic() + deadline_s
    while not (seen := look()):
        assert time.monotonic() < until_s, f"no {what} in {deadline_s:.0f} s"
        await asyncio.sleep(_LOOK_S)
    return seen
