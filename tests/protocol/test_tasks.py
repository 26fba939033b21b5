"""Tasks that are ended leave nothing behind, of two the first decides, and each change wakes all who wait for it."""

from __future__ import annotations

import asyncio

import pytest

from gossamer.protocol.memory import virtual_time
from gossamer.protocol.tasks import Changes, cancel, work_until


async def sleep(seconds: float, ended: list[float]) -> float:
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.sleep(1)  # what it still does then is waited for
        ended.append(seconds)
    return seconds


async def fail(seconds: float) -> None:
    await asyncio.sleep(seconds)
    raise ValueError("it failed")


def test_what_is_cancelled_has_ended_however_it_ends() -> None:
    async def test() -> None:
        ended: list[float] = []
        tasks = [asyncio.create_task(sleep(60, ended)), asyncio.create_task(fail(0))]
        await asyncio.sleep(2)
        await cancel(*tasks)
        assert ended == [60] and all(task.done() for task in tasks)
        await cancel()

    virtual_time.run(test())


def test_work_comes_to_something_unless_it_is_over_before() -> None:
    async def test() -> None:
        ended: list[float] = []
        assert await work_until(sleep(5, ended), sleep(60, ended)) == 5
        assert await work_until(sleep(60, ended), sleep(5, ended)) is None
        assert ended == [5, 60, 5, 60], "who was late was cancelled, and waited for"

    virtual_time.run(test())


def test_how_work_fails_is_told_and_how_the_other_fails_is_not() -> None:
    async def test() -> None:
        with pytest.raises(ValueError, match="it failed"):
            await work_until(fail(5), asyncio.sleep(60))
        assert await work_until(asyncio.sleep(60), fail(5)) is None

    virtual_time.run(test())


def test_each_change_wakes_all_who_wait_and_nobody_who_comes_later() -> None:
    async def test() -> None:
        changes, seen, woken = Changes(), list[int](), list[str]()

        async def wait(name: str) -> None:
            await changes.wait()
            woken.append(name)

        waiting = [asyncio.create_task(wait(name)) for name in "ab"]
        waiting.append(asyncio.create_task(changes.until(lambda: len(seen) == 2)))
        await asyncio.sleep(0)
        seen.append(1)
        changes.notify()
        waiting.append(asyncio.create_task(wait("late")))
        await asyncio.sleep(1)
        assert woken == ["a", "b"] and not waiting[2].done()
        seen.append(2)
        changes.notify()
        await asyncio.gather(*waiting)
        assert woken == ["a", "b", "late"]
        await changes.until(lambda: True)

    virtual_time.run(test())
