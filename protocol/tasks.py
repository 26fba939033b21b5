"""Cancel asyncio tasks without leaks, wait for state that other tasks change, and read the clock that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def loop_s() -> float:
    """Return the running event loop's time in seconds: a monotonic clock, which tests make virtual."""
    return asyncio.get_running_loop().time()


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until all have ended. Their results and exceptions are discarded."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]], name: str) -> asyncio.Task[None]:
    """Start a task and keep it in `tasks` until it ends."""
    task = asyncio.create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def work_until(work: Coroutine[Any, Any, T], stop: Coroutine[Any, Any, object]) -> T | None:
    """Return the result of `work`, or cancel it and return None if `stop` ends first. Raises what the one that ends first raises."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(stop)
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        waiting.result()  # an error in the watch is no decision to stop
        return None
    finally:
        await cancel(working, waiting)


class Changes:
    """A condition variable without a lock, for the tasks of one event loop: notify it after each change of state."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting tasks."""
        current, self._next = self._next, asyncio.Event()
        current.set()

    async def wait(self) -> None:
        """Wait for the next notification."""
        await self._next.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true. It is evaluated at once and after each notification."""
        while not condition():
            await self._next.wait()
