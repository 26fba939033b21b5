"""In-memory streams: arrival times, partition, loss and the end of a stream. The transport contract tests the rest."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from gossamer.protocol.errors import PeerGone
from gossamer.protocol.memory.conversation import FRAMES_IN_FLIGHT, Conversation, Link, MemoryChannel, MemoryLine
from tests.protocol.peers import chunk, expect_over, number_of, seeded


def way(sender: Link, receiver: Link | None = None, seed: int = 0) -> MemoryChannel:
    return MemoryChannel(MemoryLine(sender), MemoryLine(receiver or sender), random.Random(seed).random)


def arrivals(log: list[float]) -> Callable[[], None]:
    return lambda: log.append(asyncio.get_running_loop().time())


async def test_delay_is_latency_plus_bytes_at_the_slower_rate() -> None:
    log: list[float] = []
    link = way(Link(latency_s=0.2, bytes_per_s=1000), Link(latency_s=0.4, bytes_per_s=100))
    link.send(50, arrivals(log))
    await asyncio.sleep(10)
    assert log == [pytest.approx(0.3 + 50 / 100)]


async def test_frames_of_all_streams_share_a_peers_rate() -> None:
    log: list[float] = []
    sender = MemoryLine(Link(bytes_per_s=100))
    for _ in range(3):
        MemoryChannel(sender, MemoryLine(Link()), random.random).send(100, arrivals(log))
    await asyncio.sleep(10)
    assert log == [pytest.approx(second) for second in (1, 2, 3)]


async def test_jitter_never_reorders() -> None:
    order: list[int] = []
    link = way(Link(latency_s=0.1, jitter_s=1.0), seed=3)
    for number in range(100):
        link.send(1, lambda number=number: order.append(number))  # type: ignore[misc]
    await asyncio.sleep(10)
    assert order == list(range(100))


async def test_a_partition_holds_frames_and_healing_delivers_them_in_order() -> None:
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


async def test_discarded_frames_do_not_arrive_and_later_ones_do() -> None:
    order: list[int] = []
    link = way(Link(latency_s=1.0))
    link.send(1, lambda: order.append(1))
    link.lose()
    link.send(1, lambda: order.append(2))
    await asyncio.sleep(5)
    assert order == [2]


async def test_the_number_of_frames_in_flight_is_limited() -> None:
    link = way(Link(latency_s=1.0))
    for _ in range(FRAMES_IN_FLIGHT):
        await link.room()
        link.send(1, lambda: None)
    await link.room()
    assert asyncio.get_running_loop().time() == pytest.approx(1.0)


PEERS = seeded(1).peer_id, seeded(2).peer_id


def conversation(**link: Any) -> Conversation:
    line = Link(latency_s=1.0, **link)
    made = Conversation(PEERS, (MemoryLine(line), MemoryLine(line)), lambda: 0.0)
    made.begin()
    return made


async def test_the_end_of_a_stream_arrives_after_its_frames() -> None:
    lines = MemoryLine(Link(latency_s=1.0)), MemoryLine(Link(latency_s=1.0))
    talk = Conversation(PEERS, lines, lambda: 0.0)
    talk.begin()
    a, b = talk.streams
    await a.send(chunk(1))
    a.close()
    a.close()
    assert [list(line.conversations) for line in lines] == [[], [talk]]
    assert await number_of(b) == 1
    await expect_over(b)
    b.close()
    assert not lines[1].conversations


async def test_a_crash_ends_the_peers_side_at_once_and_the_partners_side_later() -> None:
    talk = conversation()
    a, b = talk.streams
    await a.send(chunk(1))
    await b.send(chunk(2))
    talk.die(PEERS[0], is_delivered=False)
    await expect_over(a)
    with pytest.raises(PeerGone, match="crashed"):
        await b.receive()
    assert asyncio.get_running_loop().time() == 1.0
