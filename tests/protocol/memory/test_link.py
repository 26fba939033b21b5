"""Arrival times in memory: latency, rate, order, cut and loss."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from protocol.memory.link import FRAMES_ON_THE_WAY, Doom, Line, Link, Way
from protocol.memory.virtual_time import run


def way(sender: Link, receiver: Link | None = None, seed: int = 0) -> Way:
    return Way(Line(sender), Line(receiver or sender), random.Random(seed).random)


def arrivals(log: list[float]) -> Callable[[], None]:
    return lambda: log.append(asyncio.get_running_loop().time())


def test_time_is_latency_plus_bytes_at_the_slower_rate() -> None:
    async def main() -> None:
        log: list[float] = []
        link = way(Link(latency_s=0.2, bytes_per_s=1000), Link(latency_s=0.4, bytes_per_s=100))
        link.send(50, arrivals(log))
        await asyncio.sleep(10)
        assert log == [pytest.approx(0.3 + 50 / 100)]

    run(main())


def test_frames_of_all_ways_share_a_peers_rate() -> None:
    async def main() -> None:
        log: list[float] = []
        sender = Line(Link(bytes_per_s=100))
        for _ in range(3):
            Way(sender, Line(Link()), random.random).send(100, arrivals(log))
        await asyncio.sleep(10)
        assert log == [pytest.approx(second) for second in (1, 2, 3)]

    run(main())


def test_jitter_never_reorders() -> None:
    async def main() -> None:
        order: list[int] = []
        link = way(Link(latency_s=0.1, jitter_s=1.0), seed=3)
        for number in range(100):
            link.send(1, lambda number=number: order.append(number))  # type: ignore[misc]
        await asyncio.sleep(10)
        assert order == list(range(100))

    run(main())


def test_a_cut_holds_and_a_mend_delivers_in_order() -> None:
    async def main() -> None:
        order: list[int] = []
        link = way(Link(latency_s=1.0))
        link.send(1, lambda: order.append(1))
        link.set_cut(True)
        await asyncio.sleep(5)
        link.send(1, lambda: order.append(2))
        await asyncio.sleep(5)
        assert order == []
        link.set_cut(False)
        assert order == [1, 2]

    run(main())


def test_what_is_lost_does_not_arrive_and_what_follows_does() -> None:
    async def main() -> None:
        order: list[int] = []
        link = way(Link(latency_s=1.0))
        link.send(1, lambda: order.append(1))
        link.lose()
        link.send(1, lambda: order.append(2))
        await asyncio.sleep(5)
        assert order == [2]

    run(main())


def test_only_so_much_may_be_under_way() -> None:
    async def main() -> None:
        link = way(Link(latency_s=1.0))
        for _ in range(FRAMES_ON_THE_WAY):
            await link.room()
            link.send(1, lambda: None)
        await link.room()
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)

    run(main())


def test_a_doom_counts_messages() -> None:
    line = Line(Link())
    line.dooms = [doom := Doom(sent=3), Doom(received=1)]
    assert [line.doom_at_send() for _ in range(4)] == [None, None, doom, None]
    assert line.doom_at_receive() is line.dooms[1]
