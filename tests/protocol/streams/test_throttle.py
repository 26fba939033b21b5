"""Rate limits hold over seconds in both directions, and delay no other traffic."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from gossamer.protocol.budgets import Allowance
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.limits import CHUNK_BYTES
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.streams.throttle import CALM_SHARE, MOST_OWED_S, SAVED_S, SMALL_FROM_NETWORK, SMALL_FROM_ONE, Bucket, Throttle
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import cancel
from tests.protocol.peers import chunk

RATE = 100_000.0
A, B = (Identity(bytes([number]) * 32) for number in (1, 2))


def now_s() -> float:
    return asyncio.get_running_loop().time()


def bucket() -> Bucket:
    made = Bucket()
    made.bytes_per_s = RATE
    return made


async def pour(into: Bucket, seconds: float, *, is_low_priority: bool = False) -> int:
    """Take frames until these seconds have passed; return the bytes that passed."""
    until_s, passed = now_s() + seconds, 0
    while True:
        await into.take(CHUNK_BYTES, is_low_priority=is_low_priority)
        if now_s() >= until_s:
            return passed
        passed += CHUNK_BYTES


async def test_a_rate_holds_over_a_minute_for_any_number_of_streams() -> None:
    for sharers in (1, 3):
        one = bucket()
        passed = sum(await asyncio.gather(*(pour(one, 60.0) for _ in range(sharers))))
        assert passed <= 60 * RATE + SAVED_S * RATE + sharers * CHUNK_BYTES
        assert passed >= 60 * RATE - sharers * CHUNK_BYTES


async def test_a_second_of_the_rate_that_nobody_used_may_be_used_later_and_no_more() -> None:
    one, passed_s = bucket(), list[float]()
    for _ in range(2):
        await asyncio.sleep(60.0)
        idle_until_s = now_s()
        for _ in range(4):
            await one.take(int(RATE * SAVED_S / 2), is_low_priority=False)
            passed_s.append(now_s() - idle_until_s)
    assert passed_s == pytest.approx(2 * [0.0, 0.0, 0.0, SAVED_S / 2])


async def test_concurrent_streams_get_equal_shares() -> None:
    one = bucket()
    first, second = await asyncio.gather(pour(one, 600.0), pour(one, 600.0))
    assert abs(first - second) <= 2 * CHUNK_BYTES


async def test_small_frames_pass_at_once_and_delay_later_chunks() -> None:
    one = bucket()
    pouring = asyncio.create_task(pour(one, 60.0))
    small = 0
    for _ in range(500):
        await asyncio.sleep(0.1)
        before_s = now_s()
        await one.take(4000, is_low_priority=False)
        assert now_s() == before_s
        small += 4000
    assert await pouring + small == pytest.approx(60 * RATE, rel=0.1)


async def test_low_priority_streams_wait_for_others_and_else_have_the_full_rate() -> None:
    one = bucket()
    meeting, giving = await asyncio.gather(pour(one, 60.0), pour(one, 60.0, is_low_priority=True))
    assert giving <= CHUNK_BYTES
    assert meeting >= 60 * RATE - 2 * CHUNK_BYTES
    assert await pour(bucket(), 60.0, is_low_priority=True) >= 0.85 * 60 * RATE


async def test_a_low_priority_stream_does_not_take_the_short_pauses_of_others() -> None:
    one, frame_s = bucket(), CHUNK_BYTES / RATE
    for _ in range(2):
        await one.take(CHUNK_BYTES, is_low_priority=False)
    giving = asyncio.create_task(pour(one, 600.0, is_low_priority=True))
    await asyncio.sleep(CALM_SHARE / 2 * frame_s)
    for _ in range(20):
        await asyncio.sleep(frame_s)  # at its end the line is idle, for half of what counts as calm
        await one.take(CHUNK_BYTES, is_low_priority=False)
    assert one.num_bytes == 22 * CHUNK_BYTES
    await cancel(giving)


async def test_a_cancelled_frame_is_not_counted() -> None:
    one = bucket()
    await one.take(CHUNK_BYTES, is_low_priority=False)
    waiting = [asyncio.create_task(one.take(CHUNK_BYTES, is_low_priority=patient)) for patient in (False, True)]
    await asyncio.sleep(0.5)
    await cancel(*waiting)
    assert one.num_bytes == CHUNK_BYTES
    before_s = now_s()
    await one.take(CHUNK_BYTES, is_low_priority=False)
    assert now_s() - before_s < CHUNK_BYTES / RATE


async def test_a_rate_may_change_and_be_removed() -> None:
    one = bucket()
    await pour(one, 10.0)
    one.bytes_per_s = 10 * RATE
    assert await pour(one, 60.0) == pytest.approx(600 * RATE, rel=0.05)
    one.bytes_per_s = float("inf")
    before_s = now_s()
    await one.take(1 << 40, is_low_priority=False)
    assert now_s() == before_s


async def test_a_flood_outside_of_streams_holds_them_up_for_some_seconds_only() -> None:
    """An hour of ten times the rate, as of a relay or a stranger that p2pd listens to."""

    one = bucket()
    for _ in range(1800):
        one.owe(int(2 * 10 * RATE))
        await asyncio.sleep(2.0)
    before_s = now_s()
    await one.take(CHUNK_BYTES, is_low_priority=False)
    assert now_s() - before_s <= MOST_OWED_S
    assert await pour(one, 60.0) == pytest.approx(60 * RATE, rel=0.1)


Talk = Callable[[Stream], Awaitable[None]]


async def exchange(throttles: tuple[Throttle, Throttle], caller: Talk, answerer: Talk) -> None:
    network, answered = MemoryNetwork(), asyncio.Event()

    async def answer(purpose: Purpose, stream: Stream) -> None:
        await answerer(stream)
        answered.set()

    a = throttles[0].limited_transport(network.start_peer(A.peer_id, throttles[0].limited_handler(answer)))
    network.start_peer(B.peer_id, throttles[1].limited_handler(answer))
    stream = await a.connect(B.peer_id, (), Purpose.MEET)
    await caller(stream)
    await answered.wait()
    await network.close()


async def send_ten(stream: Stream) -> None:
    for number in range(10):
        await stream.send(chunk(number, CHUNK_BYTES))


async def take_ten(stream: Stream) -> None:
    for _ in range(10):
        await stream.receive()


@pytest.mark.parametrize(("side", "way"), [(0, "up"), (0, "down"), (1, "up"), (1, "down")])
async def test_streams_keep_to_the_rates_of_both_ends_in_both_directions(side: int, way: str) -> None:
    """Send ten chunks in each direction: only the limited direction takes as long as its rate implies, for either caller."""

    throttles = (Throttle(), Throttle())
    getattr(throttles[side], way).bytes_per_s = RATE

    async def both(stream: Stream) -> None:
        await asyncio.gather(send_ten(stream), take_ten(stream))

    await exchange(throttles, both, both)
    assert now_s() == pytest.approx(9 * CHUNK_BYTES / RATE, rel=0.1)
    for throttle in throttles:
        assert throttle.up.num_bytes == pytest.approx(10 * CHUNK_BYTES, rel=0.01)
        assert throttle.down.num_bytes == pytest.approx(10 * CHUNK_BYTES, rel=0.01)


@pytest.mark.parametrize(("num", "allowed"), [(1, SMALL_FROM_ONE), (4, SMALL_FROM_NETWORK)])
async def test_a_flood_of_small_frames_is_read_slowly_and_delays_no_other_partner(num: int, allowed: Allowance) -> None:
    """Each takes its reader fifty microseconds and more: without a limit one member costs another a core."""
    network, throttle, read = MemoryNetwork(), Throttle(), Counter[PeerId]()

    async def answer(purpose: Purpose, stream: Stream) -> None:
        while True:
            await stream.receive()
            read[stream.partner] += 1

    async def flood(who: Identity, number: int) -> None:
        network.places[who.peer_id] = f"/ip4/20.0.0.{number}/tcp/1"
        stream = await network.start_peer(who.peer_id, answer).connect(B.peer_id, (), Purpose.MEET)
        while True:
            await stream.send(chunk(1))

    network.start_peer(B.peer_id, throttle.limited_handler(answer))
    floods = [asyncio.create_task(flood(Identity(bytes([10 + number]) * 32), number)) for number in range(num)]
    await asyncio.sleep(8.0)
    most = allowed.capacity * (1.0 + 8.0 / allowed.refill_s)
    assert 0.9 * most < sum(read.values()) <= most
    stream = await network.start_peer(A.peer_id, answer).connect(B.peer_id, (), Purpose.MEET)
    for _ in range(100):
        await stream.send(chunk(1))
    await asyncio.sleep(0.1)
    assert read[A.peer_id] == 100
    await cancel(*floods)
    await network.close()
