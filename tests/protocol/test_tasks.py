"""Cancelled tasks have ended, `work_until` ends with the first of two, and a notification wakes all waiting tasks."""

from __future__ import annotations

import asyncio

import pytest

from gossamer.protocol.tasks import Changes, cancel, work_until


async def sleep(seconds: float, ended: list[float]) -> float:
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.sleep(1)  # `cancel` waits for this cleanup
        ended.append(seconds)
    return seconds


async def fail(seconds: float) -> None:
    await asyncio.sleep(seconds)
    raise ValueError("it failed")


async def test_cancel_waits_for_the_end_of_every_task() -> None:
    ended: list[float] = []
    tasks = [asyncio.create_task(sleep(60, ended)), asyncio.create_task(fail(0))]
    await asyncio.sleep(2)
    await cancel(*tasks)
    assert ended == [60] and all(task.done() for task in tasks)
    await cancel()


async def test_work_returns_its_result_unless_it_is_stopped() -> None:
    ended: list[float] = []
    assert await work_until(sleep(5, ended), sleep(60, ended)) == 5
    assert await work_until(sleep(60, ended), sleep(5, ended)) is None
    assert ended == [5, 60, 5, 60], "who was late was cancelled, and waited for"


async def test_an_exception_of_the_work_or_of_the_stop_is_raised() -> None:
    """A stop that fails has not decided to stop: the caller must not take its end for a decision."""

    ended: list[float] = []
    with pytest.raises(ValueError, match="it failed"):
        await work_until(fail(5), sleep(60, ended))
    with pytest.raises(ValueError, match="it failed"):
        await work_until(sleep(60, ended), fail(5))
    assert ended == [60, 60], "the other one was cancelled, and waited for"
    assert await work_until(sleep(5, ended), fail(60)) == 5


async def test_a_notification_wakes_waiting_tasks_and_no_later_ones() -> None:
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
