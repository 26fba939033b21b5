"""A bounded queue for newcomers: a few at a time get the manifest and member records, each within seconds.

It is open to everybody with an invite. An answer that takes too long is cancelled: after MOST_S, or as soon as all places are taken and
another newcomer asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from gossamer.protocol.errors import RefusalCode, Refused
from gossamer.protocol.tasks import cancel

PLACES = 8
MOST_S = 5.0  # 64 KiB at the slowest legal rate take 2 s


class Hatch:
    """A limited number of places for answers; one queue for all streams of a node."""

    def __init__(self) -> None:
        self._answering: dict[asyncio.Task[None], None] = {}  # the oldest first

    async def answer(self, work: Coroutine[Any, Any, None]) -> None:
        """Run an answer in one of the places. Raises Refused when it was cancelled for another or for time, and as `work`. Cancel-safe."""
        if len(self._answering) >= PLACES:
            slowest = next(iter(self._answering))
            del self._answering[slowest]
            slowest.cancel()
        task = asyncio.create_task(work, name="hatch")
        self._answering[task] = None
        try:
            await asyncio.wait([task], timeout=MOST_S)
            if not task.done() or task.cancelled():
                raise Refused(RefusalCode.BUSY, "busy; retry later")
            task.result()
        finally:
            self._answering.pop(task, None)
            await cancel(task)
