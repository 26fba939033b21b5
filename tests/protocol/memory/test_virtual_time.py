"""Virtual time: hours pass at once, in a deterministic order."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from gossamer.protocol.memory.virtual_time import Deadlock, run


def test_sleep_advances_only_the_virtual_clock() -> None:
    async def main() -> float:
        await asyncio.sleep(10 * 24 * 3600)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run(main()) == pytest.approx(10 * 24 * 3600)
    assert time.monotonic() - began < 5


def test_the_clock_starts_at_start_s() -> None:
    async def main() -> float:
        return asyncio.get_running_loop().time()

    assert run(main(), start_s=1e9) == 1e9


def test_timers_fire_in_order_of_their_time() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def after(seconds: int) -> None:
            await asyncio.sleep(seconds)
            order.append(seconds)

        await asyncio.gather(*(after(seconds) for seconds in (3, 1, 2)))
        return order

    assert run(main()) == [1, 2, 3]


def test_timeout_expires_at_its_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(30)


def test_waiting_forever_raises_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="main"):
        run(main())


def test_executor_functions_run_at_once_and_resolve_in_the_next_iteration() -> None:
    order: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().call_soon(order.append, "meanwhile")
        assert await asyncio.to_thread(lambda: order.append("done") or 7) == 7  # type: ignore[func-returns-value]
        order.append("resolved")
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        assert asyncio.get_running_loop().time() == 0.0

    run(main())
    assert order == ["done", "meanwhile", "resolved"]


def test_remaining_tasks_are_cancelled() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("forever")

    async def main() -> None:
        asyncio.get_running_loop().create_task(forever())
        await asyncio.sleep(1)

    run(main())
    assert ended == ["forever"]


def _churn(seed: int) -> list[tuple[float, int]]:
    """Cancel a set of tasks together, and return the order and times of their ends."""
    log: list[tuple[float, int]] = []

    async def worker(number: int, draw: random.Random) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await asyncio.sleep(draw.random())
                log.append((loop.time(), number))
        finally:
            log.append((loop.time(), -number))

    async def main() -> None:
        draw = random.Random(seed)
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(worker(number, draw))
                await asyncio.sleep(3)
                raise ValueError("enough")

    run(main())
    return log


def test_the_same_seed_gives_the_same_schedule() -> None:
    first = _churn(1)
    garbage = [bytearray(997) for _ in range(1000)]  # changes object addresses for the second run
    assert _churn(1) == first
    assert _churn(2) != first
    del garbage
