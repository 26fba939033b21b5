"""Two spliced sockets behave like one connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import pytest
import uvloop

from gossamer.protocol.libp2p.splice import CarriedBytes, Pair, drop, splice, wait_while_active
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.tasks import cancel

pytestmark = pytest.mark.real_time


@asynccontextmanager
async def spliced() -> AsyncIterator[tuple[Pair, Pair, asyncio.Task[None], CarriedBytes]]:
    """Yield the two outer ends of a splice, its task and its counts."""
    sockets = [*socket.socketpair(), *socket.socketpair()]
    one, left, right, other = [await asyncio.open_connection(sock=item) for item in sockets]
    carried = CarriedBytes()
    task = asyncio.create_task(splice(left, right, carried))
    try:
        yield one, other, task, carried
    finally:
        await cancel(task)
        for _, writer in (one, left, right, other):
            drop(writer)
        await asyncio.sleep(0)


@pytest.mark.parametrize("loop", [pytest.param(of, marks=pytest.mark.real_time(loop_factory=of)) for of in (None, uvloop.new_event_loop)])
async def test_small_reads_are_merged_and_no_byte_is_lost(loop: object) -> None:
    async with spliced() as (one, other, task, carried):
        packets = [bytes([number]) * 1448 for number in range(200)]
        pieces = []

        async def dribble() -> None:
            for packet in packets:
                other[1].write(packet)
                await asyncio.sleep(0)
            other[1].close()

        writing = asyncio.create_task(dribble())
        while data := await one[0].read(1 << 20):
            pieces.append(data)
        await writing
        await task
        assert b"".join(pieces) == b"".join(packets)
        assert len(pieces) < len(packets) / 2
        assert carried.received == 1448 * len(packets)


async def test_bytes_are_copied_in_both_directions_and_counted() -> None:
    async with spliced() as (one, other, task, carried):
        data = bytes(range(256)) * 4096
        for near, far in ((one, other), (other, one)):
            near[1].write(data)
            assert await far[0].readexactly(len(data)) == data
        assert (carried.sent, carried.received) == (len(data), len(data))


async def test_bytes_written_before_closing_arrive() -> None:
    async with spliced() as (one, other, task, carried):
        data = bytes(1 << 20)
        one[1].write(data)
        one[1].close()
        assert await other[0].read() == data
        await task


async def test_a_broken_side_closes_the_other_without_an_error() -> None:
    async with spliced() as (one, other, task, carried):
        other[1].transport.abort()
        assert await one[0].read() == b""
        await task


async def test_a_writer_waits_for_the_remote_reader() -> None:
    async with spliced() as (one, other, task, carried):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                while carried.sent < 64 << 20:
                    one[1].write(bytes(1 << 16))
                    await one[1].drain()
        assert carried.sent < 8 << 20


async def test_cancelling_closes_both_sides() -> None:
    async with spliced() as (one, other, task, carried):
        await asyncio.sleep(0)
        task.cancel()
        assert await one[0].read() == await other[0].read() == b""


@pytest.mark.parametrize(
    ("moves_s", "ends_s"),
    [
        pytest.param(range(0), 5, id="nothing moves"),
        pytest.param(range(0, 23, 4), 25, id="it moves for a while"),
        pytest.param(range(0, 1000, 4), 100, id="it moves for too long"),
        pytest.param(range(0, 1000, 4), 63, id="the work is done before"),
    ],
)
def test_the_wait_lasts_as_long_as_there_is_progress(moves_s: range, ends_s: int) -> None:
    is_done = ends_s == 63

    async def main() -> None:
        loop = asyncio.get_running_loop()
        work = asyncio.create_task(asyncio.sleep(ends_s if is_done else 1000))
        with nullcontext() if is_done else pytest.raises(TimeoutError):
            await wait_while_active(work, lambda: sum(move_s <= loop.time() for move_s in moves_s), quiet_s=5, most_s=100)
        assert loop.time() == pytest.approx(ends_s)
        assert work.done()

    virtual_time.run(main())


def test_an_exception_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ConnectionError("it broke")

    with pytest.raises(ConnectionError):
        asyncio.run(wait_while_active(work(), lambda: 0, quiet_s=5, most_s=5))
