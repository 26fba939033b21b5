"""An event loop whose clock jumps to the next timer instead of waiting for it, so that an hour of meetings runs in a second.

It has no sockets and no signals, and threads whose work takes no time: whatever runs on it gets its time from `loop.time()` and its
network from `protocol.memory`. The same program runs in the same order every time: tasks hash by creation number, so that even the
sets of tasks inside asyncio (`TaskGroup`, `wait`) are walked in a fixed order. Idea: FoundationDB's simulator; the asyncio trick
(a selector that moves the clock) is common knowledge.
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
    """Every task waits for something that can no longer happen."""


class _NumberedTask(asyncio.Task[T]):
    """A task that hashes by the order of creation, not by its address."""

    def __init__(self, coro: Coroutine[Any, Any, T], *, loop: VirtualTimeLoop, number: int, **options: Any) -> None:
        self._number = number  # before super(), which puts the task into a set
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class _Clock:
    """Stands where a selector would: nothing is ever ready, so waiting means moving the clock."""

    def __init__(self, advance: Callable[[float | None], None]) -> None:
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0:
            self._advance(timeout)
        return []


class VirtualTimeLoop(base_events.BaseEventLoop):
    """An asyncio event loop under virtual time, which starts at `start_s`.

    Raises Deadlock out of `run_until_complete` when no task can run and no timer is set.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        super().__init__()
        self._now_s = start_s
        self._num_tasks = 0
        self._clock_resolution = _RESOLUTION_S
        self._selector = _Clock(self._advance)
        self.set_task_factory(self._new_task)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        """Run it at once and tell the result in the loop's next round: a thread would run in real time, and no seed could repeat it."""
        done: asyncio.Future[T] = self.create_future()

        def tell(set_it: Callable[[Any], None], value: object) -> None:
            if not done.done():
                set_it(value)

        try:
            self.call_soon(tell, done.set_result, func(*args))
        except Exception as error:
            self.call_soon(tell, done.set_exception, error)
        return done

    def _advance(self, seconds: float | None) -> None:
        if seconds is None:
            waiting = "\n".join(sorted(repr(task) for task in asyncio.all_tasks(self)))
            raise Deadlock(f"no task can run and no timer is set; tasks that wait:\n{waiting}")
        self._now_s += seconds

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        self._num_tasks += 1
        return _NumberedTask(coro, loop=self, number=self._num_tasks, **options)

    def _process_events(self, event_list: list[Any]) -> None:
        """Nothing: there are no file descriptors."""

    def _write_to_self(self) -> None:
        """Nothing: nobody can be asleep in a selector."""


def run(main: Coroutine[Any, Any, T], *, start_s: float = 0.0) -> T:
    """Run `main` to its end under virtual time, cancel what it left behind, and return its result."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start_s)) as runner:
        return runner.run(main)
