"""The bounded queue: a slow answer gives way, to the clock or to the next newcomer, and no other does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gossamer.peer.sync.server import MOST_S, PLACES, BoundedQueue
from gossamer.protocol.errors import RefusalCode, Refused, TransportError
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.tasks import cancel


async def takes(seconds: float) -> None:
    await asyncio.sleep(seconds)


def play(test: Callable[[BoundedQueue], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await test(BoundedQueue())
        assert len(asyncio.all_tasks()) == 1

    virtual_time.run(main())


async def refused(answer: asyncio.Task[None]) -> bool:
    try:
        await answer
    except Refused as refusal:
        assert refusal.code is RefusalCode.BUSY
        return True
    return False


def start(queue: BoundedQueue, seconds: float) -> asyncio.Task[None]:
    return asyncio.create_task(queue.answer(takes(seconds)))


def test_a_request_that_takes_too_long_is_refused() -> None:
    async def test(queue: BoundedQueue) -> None:
        slow, quick = start(queue, 100.0), start(queue, MOST_S - 1)
        assert [await refused(quick), await refused(slow)] == [False, True]
        assert asyncio.get_running_loop().time() == MOST_S

    play(test)


def test_a_newcomer_takes_the_place_of_the_slowest_at_once() -> None:
    async def test(queue: BoundedQueue) -> None:
        slow = [start(queue, 100.0) for _ in range(PLACES)]
        await asyncio.sleep(1.0)
        quick = start(queue, 0.1)
        assert not await refused(quick)
        assert await refused(slow[0])
        assert asyncio.get_running_loop().time() < MOST_S
        assert [await refused(other) for other in slow[1:]] == [True] * (PLACES - 1)
        assert asyncio.get_running_loop().time() == MOST_S

    play(test)


def test_an_error_inside_is_raised_outside() -> None:
    async def fail() -> None:
        raise TransportError("gone")

    async def test(queue: BoundedQueue) -> None:
        with pytest.raises(TransportError, match="gone"):
            await queue.answer(fail())

    play(test)


def test_an_answer_that_is_cancelled_leaves_nothing() -> None:
    async def test(queue: BoundedQueue) -> None:
        answer = start(queue, 1.0)
        await asyncio.sleep(0.5)
        await cancel(answer)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "queue"]

    play(test)
