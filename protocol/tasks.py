"""How tasks end: cancelled and waited for, so that nothing of them is left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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
