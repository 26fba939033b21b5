from __future__ import annotations

import asyncio

import pytest

from gossamer.protocol.memory.virtual_time import run
from gossamer.protocol.tasks import loop_s


def test_the_books_clock_is_the_loops_clock() -> None:
    async def program() -> float:
        began_s = loop_s()
        await asyncio.sleep(3600.0)
        return loop_s() - began_s

    assert run(program()) == pytest.approx(3600.0)


def test_outside_a_loop_the_books_clock_raises() -> None:
    with pytest.raises(RuntimeError):
        loop_s()
