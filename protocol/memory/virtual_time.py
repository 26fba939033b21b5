"""An event loop under virtual time: its clock jumps to the next timer, so an hour of meetings runs in a second.

It has no sockets and no signals, and it runs executor functions at once. Tasks hash by creation number, so their order is deterministic.
"""

from __future__ import annotations

import asyncio
import selectors
from asyncio import base_events
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_RESOLUTION_S = 1e-9


class Deadlock(RuntimeError):
    """All tasks wait and no timer is set, so no task can ever run again."""


class _NumberedTask(asyncio.Task[T]):
    def __init__(self, coro: Coroutine[Any, Any, T], *, loop: VirtualTimeLoop, number: int, **options: Any) -> None:
        self._number = number  # before super().__init__(), which adds the task to a set
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualTimeLoop(base_events.BaseEventLoop):
    """An event loop under virtual time from `start_s`. `run_until_complete` raises Deadlock if no task can run and no timer is set."""

    def __init__(self, start_s: float = 0.0) -> None:
        super().__init__()
        self._now_s = start_s
        self._num_tasks = 0
        self._clock_resolution = _RESOLUTION_S
        self._selector = self  # see `select`
        self.set_task_factory(self._new_task)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        """Run `func` at once and resolve the future in the next loop iteration. A thread would make the order of execution random."""
        future: asyncio.Future[T] = self.create_future()

        def resolve(setter: Callable[[Any], None], value: object) -> None:
            if not future.done():
                setter(value)

        try:
            self.call_soon(resolve, future.set_result, func(*args))
        except Exception as error:
            self.call_soon(resolve, future.set_exception, error)
        return future

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock by the timeout, as the loop's own selector: there are no file descriptors to wait for."""
        if timeout is None:
            waiting = "\n".join(sorted(repr(task) for task in asyncio.all_tasks(self)))
            raise Deadlock(f"no task can run and no timer is set; waiting tasks:\n{waiting}")
        self._now_s += timeout
        return []

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        self._num_tasks += 1
        return _NumberedTask(coro, loop=self, number=self._num_tasks, **options)

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: there are no file descriptors."""

    def _write_to_self(self) -> None:
        """Do nothing: no thread blocks in a selector."""


def run(main: Coroutine[Any, Any, T], *, start_s: float = 0.0) -> T:
    """Run `main` under virtual time, cancel the tasks that it leaves running, and return its result."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start_s)) as runner:
        return runner.run(main)
