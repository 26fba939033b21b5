"""The contract of every transport, tested on libp2p and in memory."""

from __future__ import annotations

import asyncio

import pytest

from gossamer.protocol.errors import PeerGone
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import ANSWER_BYTES, CHUNK_BYTES
from gossamer.protocol.messages.messages import Chunk, ChunkBeside, Part
from gossamer.protocol.streams import transport
from gossamer.protocol.streams.transport import BESIDE_BYTES, Purpose, Stream
from tests.protocol.peers import chunk, echo, expect_over, nobody, number_of
from tests.protocol.worlds import World, stream_to

MIB = 1 << 20
CHUNK = 256 * 1024


async def test_messages_arrive_in_order_in_both_directions(world: World) -> None:
    stream = await stream_to(world, echo)

    async def send() -> None:
        for number in range(200):
            await stream.send(chunk(number))

    sending = asyncio.create_task(send())
    assert [await number_of(stream) for _ in range(200)] == list(range(200))
    await sending
    assert stream.bytes_sent == stream.bytes_received > 200
    stream.close()


async def test_eight_megabytes_in_both_directions_at_once(world: World) -> None:
    num_chunks = 8 * MIB // CHUNK
    ended = asyncio.Event()

    async def send(stream: Stream) -> None:
        for number in range(num_chunks):
            await stream.send(chunk(number, CHUNK))

    async def receive(stream: Stream) -> None:
        for number in range(num_chunks):
            assert await stream.receive() == chunk(number, CHUNK)

    async def both(purpose: Purpose, stream: Stream) -> None:
        await asyncio.gather(send(stream), receive(stream))
        assert stream.bytes_sent == stream.bytes_received > 8 * MIB
        ended.set()

    stream = await stream_to(world, both)
    await asyncio.gather(send(stream), receive(stream))
    stream.close()
    await ended.wait()


async def test_both_ends_know_their_partner(world: World) -> None:
    seen: list[tuple[Purpose, PeerId]] = []

    async def note(purpose: Purpose, stream: Stream) -> None:
        seen.append((purpose, stream.partner))
        await echo(purpose, stream)

    a, b = await world.peer(nobody), await world.peer(note)
    for purpose in (Purpose.MEET, Purpose.FETCH):
        stream = await a.connect(b, purpose)
        assert stream.partner == b.peer_id
        await stream.send(chunk(1))
        await stream.receive()
        stream.close()
    assert seen == [(Purpose.MEET, a.peer_id), (Purpose.FETCH, a.peer_id)]


async def test_messages_sent_before_closing_are_delivered(world: World) -> None:
    received: asyncio.Queue[int] = asyncio.Queue()

    async def slow(purpose: Purpose, stream: Stream) -> None:
        await asyncio.sleep(0.2)
        for _ in range(20):
            received.put_nowait(await number_of(stream))
        await expect_over(stream)
        received.put_nowait(-1)

    stream = await stream_to(world, slow)
    for number in range(20):
        await stream.send(chunk(number))
    stream.close()
    stream.close()
    await expect_over(stream)
    assert [await received.get() for _ in range(21)] == [*range(20), -1]


async def test_the_other_side_may_close_too(world: World) -> None:
    async def brief(purpose: Purpose, stream: Stream) -> None:
        await stream.receive()
        for number in range(20):
            await stream.send(chunk(number))
        stream.close()
        await expect_over(stream)

    stream = await stream_to(world, brief)
    await stream.send(chunk(0))
    assert [await number_of(stream) for _ in range(20)] == list(range(20))
    await expect_over(stream)
    stream.close()


async def test_closing_ends_a_waiting_receive(world: World) -> None:
    stream = await stream_to(world, echo)
    waiting = asyncio.create_task(stream.receive())
    await asyncio.sleep(0.05)
    stream.close()
    with pytest.raises(PeerGone):
        await waiting


async def test_large_answers_pass_beside_the_messages_once_there_is_a_bulk_stream(world: World) -> None:
    data = bytes(range(256)) * (MIB // 256)

    async def give(purpose: Purpose, stream: Stream) -> None:
        for turn in range(3):
            assert await number_of(stream) == turn
            await stream.send(chunk(turn))
            for begin in range(0, MIB, CHUNK):
                await stream.send_bytes(memoryview(data)[begin : begin + CHUNK])
        await expect_over(stream)

    stream = await stream_to(world, give, Purpose.FETCH)
    assert stream.answer_bytes == CHUNK_BYTES
    await stream.open_bulk()
    assert stream.answer_bytes == ANSWER_BYTES
    for turn in range(3):
        await stream.send(chunk(turn))
        taken = bytearray(MIB)
        assert await number_of(stream) == turn
        await stream.receive_into(memoryview(taken)[:1000])
        await stream.receive_into(memoryview(taken)[1000:])
        assert taken == data
    assert stream.bytes_received > 3 * MIB
    stream.close()
    with pytest.raises(PeerGone):
        await stream.receive_into(memoryview(taken))


async def test_large_chunks_pass_beside_the_messages_in_their_order(world: World) -> None:
    """Without a bulk stream the same chunks are messages."""
    sizes = (1, CHUNK, 100, BESIDE_BYTES - 1, BESIDE_BYTES, CHUNK)

    async def repeat(purpose: Purpose, stream: Stream) -> None:
        for _ in range(2 * len(sizes)):
            message = await stream.receive()
            assert isinstance(message, Chunk)
            await stream.send_chunk(message)
        await expect_over(stream)

    stream = await stream_to(world, repeat, Purpose.PASS)
    for _ in range(2):
        sent = [chunk(number, size) for number, size in enumerate(sizes)]
        for one in sent:
            await stream.send_chunk(one)
        assert [await stream.receive() for _ in sizes] == sent
        await stream.open_bulk()
    stream.close()


async def test_a_chunk_beside_a_stream_that_has_no_bulk_stream_ends_it(world: World) -> None:
    stream = await stream_to(world, echo, Purpose.PASS)
    await stream.send(ChunkBeside(Part.GRADIENT, 0, CHUNK))
    with pytest.raises(PeerGone):
        await stream.receive()
    stream.close()


async def test_a_chunk_beside_a_stream_whose_bytes_do_not_come_ends_it(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Else a stranger holds a place among the inbound streams for ever."""
    monkeypatch.setattr(transport, "BULK_S", 0.2)
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def wait(purpose: Purpose, stream: Stream) -> None:
        with pytest.raises(PeerGone, match="silent"):
            await stream.receive()
        ended.put_nowait("ended")

    stream = await stream_to(world, wait)
    await stream.open_bulk()
    await stream.send(ChunkBeside(Part.GRADIENT, 0, CHUNK))
    async with asyncio.timeout(10):
        await ended.get()
    stream.close()
