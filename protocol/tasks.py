"""How tasks end, so that nothing of them is left, and how they wait for what others change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def work_until(work: Coroutine[Any, Any, T], over: Coroutine[Any, Any, object]) -> T | None:
    """Return what `work` comes to; None, and it is cancelled, where `over` ends before. Raises as `work`; how `over` ends is nobody's."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(over)
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await cancel(working, waiting)


class Changes:
    """What tasks of one event loop wait for again and again; whoever changes something tells it."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        """Wake all who wait."""
        told, self._next = self._next, asyncio.Event()
        told.set()

    async def wait(self) -> None:
        """Wait for the next change."""
        await self._next.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds of which each change is told."""
        while not condition():
            await self._next.wait()
