"""A bounded queue for newcomers, who ask what the run is and who is in it: each is served within seconds, a few at a time.

Every peer with an invite may ask, so a slow answer is dropped after a while, or when all places are taken and another newcomer asks.
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
    """Places for answers; one object for all streams of a node."""

    def __init__(self) -> None:
        self._answering: dict[asyncio.Task[None], None] = {}  # the one that has been here longest stands first

    async def answer(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work that answers a newcomer. Raises Refused when it took too long or was displaced, and as `work`. Cancel-safe."""
        if len(self._answering) >= PLACES:
            slowest = next(iter(self._answering))
            del self._answering[slowest]
            slowest.cancel()
        task = asyncio.create_task(work, name="hatch")
        self._answering[task] = None
        try:
            await asyncio.wait([task], timeout=MOST_S)
            if not task.done() or task.cancelled():
                raise Refused(RefusalCode.BUSY, "busy with other newcomers; retry later")
            task.result()
        finally:
            self._answering.pop(task, None)
            await cancel(task)
