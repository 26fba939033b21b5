"""The hatch: where newcomers are told what the run is and who is in it, each in seconds, a few at a time.

It is open to everybody with an invite, so whoever takes long here gives way: to the clock, or to the next one where all places are taken.
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
    """Places for answers; one for all streams of a node."""

    def __init__(self) -> None:
        self._answering: dict[asyncio.Task[None], None] = {}  # the slowest, for it has been here longest, stands first

    async def answer(self, work: Coroutine[Any, Any, None]) -> None:
        """Let an answer be given. Raises Refused when it took too long or had to give way, and what `work` raises. Cancel-safe."""
        if len(self._answering) >= PLACES:
            slowest = next(iter(self._answering))
            del self._answering[slowest]
            slowest.cancel()
        task = asyncio.create_task(work, name="hatch")
        self._answering[task] = None
        try:
            await asyncio.wait([task], timeout=MOST_S)
            if not task.done() or task.cancelled():
                raise Refused(RefusalCode.BUSY, "others wait to be told about the run; read faster, or come again")
            task.result()
        finally:
            self._answering.pop(task, None)
            await cancel(task)
