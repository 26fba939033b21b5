"""The contract of every transport under faults: crashes, garbage, stalls and floods. Tested on libp2p and in memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from gossamer.protocol.errors import BadMessage, PeerGone, Unreachable
from gossamer.protocol.streams.admission import StreamCaps
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.protocol.peers import Raw, chunk, echo, expect_over, nobody, number_of, say, seeded, send_raw
from tests.protocol.worlds import Peer, World, stream_to

MIB = 1 << 20
CHUNK = 256 * 1024


async def test_a_crash_ends_the_stream_at_both_ends(world: World) -> None:
    heard, over = asyncio.Event(), asyncio.Event()

    async def listen(purpose: Purpose, stream: Stream) -> None:
        await stream.receive()
        heard.set()
        await expect_over(stream)
        over.set()

    a, b = await world.peer(nobody), await world.peer(listen)
    stream = await a.connect(b)
    await stream.send(chunk(1))
    await heard.wait()
    await world.kill(b)
    async with asyncio.timeout(5):
        await expect_over(stream)
        await over.wait()
    stream.close()
    with pytest.raises(Unreachable):
        await a.connect(b)


async def test_garbage_is_a_bad_message(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    send_raw(monkeypatch)
    answers: asyncio.Queue[str] = asyncio.Queue()

    async def rude(purpose: Purpose, stream: Stream) -> None:
        with pytest.raises(BadMessage):
            await stream.receive()
        await stream.send(Raw(b"\xff" * 1000))
        answers.put_nowait("refused")

    a, b = await world.peer(nobody), await world.peer(rude)
    stream: Any = await a.connect(b)
    await stream.send(Raw(b"not a frame"))
    assert await answers.get() == "refused"
    with pytest.raises(BadMessage):
        await stream.receive()
    stream.close()


async def accepted(a: Peer, b: Peer) -> Stream:
    """Open a stream for a meeting as soon as the partner has noticed that another one is over."""
    async with asyncio.timeout(20):
        while True:
            with suppress(Unreachable):
                return await a.connect(b)
            await asyncio.sleep(0.05)


async def test_the_streams_of_one_partner_are_limited(world: World) -> None:
    a, b = await world.peer(nobody), await world.peer(echo, StreamCaps(per_purpose=2, total=3))
    streams = [await a.connect(b) for _ in range(2)]
    for stream in streams:  # a silent partner has fewer connections and is replaced
        await say(stream, 1)
    with pytest.raises(Unreachable):
        await a.connect(b)
    streams.append(await a.connect(b, Purpose.FETCH))
    await say(streams[2], 1)
    with pytest.raises(Unreachable):
        await a.connect(b, Purpose.FETCH)
    for stream in streams:
        await say(stream, 1)
    streams[0].close()
    again = await accepted(a, b)
    for stream in (again, *streams[1:]):
        stream.close()


async def test_a_banned_peer_is_rejected(world: World) -> None:
    banned = set()
    a, b = await world.peer(nobody), await world.peer(echo, is_banned=lambda partner: partner in banned)
    banned.add(a.peer_id)
    with pytest.raises(Unreachable):
        await a.connect(b)
    banned.clear()
    stream = await a.connect(b)
    await say(stream, 1)
    stream.close()


async def test_silent_streams_do_not_keep_others_out(world: World) -> None:
    a, c, d = [await world.peer(nobody) for _ in range(3)]
    b = await world.peer(echo, StreamCaps(total=2))
    talks = await c.connect(b)
    await say(talks, 1)
    silent = await a.connect(b)
    late = await d.connect(b)
    async with asyncio.timeout(5):
        await expect_over(silent)
    for stream in (talks, late):
        await say(stream, 2)
    for stream in (talks, silent, late):
        stream.close()


async def test_a_failing_handler_ends_only_its_stream(world: World) -> None:
    async def fail(purpose: Purpose, stream: Stream) -> None:
        if await number_of(stream) == 0:
            raise RuntimeError("a bug")
        await stream.send(chunk(7))

    a, b = await world.peer(nobody), await world.peer(fail)
    broken = await a.connect(b)
    await broken.send(chunk(0))
    await expect_over(broken)
    broken.close()
    fine = await a.connect(b)
    await fine.send(chunk(1))
    assert await number_of(fine) == 7
    fine.close()


async def test_a_cancelled_stream_can_be_closed_and_affects_no_other(world: World) -> None:
    over: asyncio.Queue[str] = asyncio.Queue()

    async def deaf(purpose: Purpose, stream: Stream) -> None:
        await asyncio.sleep(0.5)
        with pytest.raises(PeerGone):
            while True:
                await stream.receive()
        over.put_nowait("over")

    a, b = await world.peer(nobody), await world.peer(deaf)
    for _ in range(2):
        stream = await a.connect(b)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                while True:  # more than the stream buffers: some send will wait and be cancelled
                    await stream.send(chunk(1, CHUNK))
        with pytest.raises((PeerGone, TimeoutError)):
            async with asyncio.timeout(0.05):
                await stream.receive()
        stream.close()
        async with asyncio.timeout(20):
            assert await over.get() == "over"


async def test_a_sender_waits_for_a_partner_that_does_not_read(world: World) -> None:
    async def deaf(purpose: Purpose, stream: Stream) -> None:
        await asyncio.Event().wait()

    stream = await stream_to(world, deaf)
    while True:
        try:
            async with asyncio.timeout(0.5):
                await stream.send(chunk(1, CHUNK))
        except TimeoutError:
            break
        assert stream.bytes_sent < 64 * MIB
    stream.close()


async def test_a_silent_stream_is_closed(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr("gossamer.protocol.streams.admission.FIRST_FRAME_S", 0.3)
    stream = await stream_to(world, nobody)
    async with asyncio.timeout(5):
        await expect_over(stream)
    stream.close()


async def test_a_missing_peer_is_unreachable(world: World) -> None:
    a = await world.peer(nobody)
    for partner in (seeded(999).peer_id, a.peer_id):
        with pytest.raises(Unreachable):
            await a.transport.connect(partner, ("/ip4/127.0.0.1/tcp/9",), Purpose.MEET)


async def test_a_crash_ends_a_bulk_stream_at_both_ends(world: World) -> None:
    over = asyncio.Event()

    async def give(purpose: Purpose, stream: Stream) -> None:
        await stream.receive()
        with pytest.raises(PeerGone):
            while True:
                await stream.send_bytes(memoryview(bytes(CHUNK)))
        over.set()

    a, b = await world.peer(nobody), await world.peer(give)
    stream = await a.connect(b, Purpose.FETCH)
    await stream.open_bulk()
    await stream.send(chunk(1))
    await stream.receive_into(memoryview(bytearray(10)))
    await world.kill(b)
    async with asyncio.timeout(5):
        await over.wait()
        with pytest.raises(PeerGone):
            while True:
                await stream.receive_into(memoryview(bytearray(CHUNK)))
    stream.close()


async def test_a_stream_ends_with_its_bulk_stream(world: World) -> None:
    """Messages could still pass, but not the bytes that belong to them."""

    async def drop_bulk(purpose: Purpose, stream: Stream) -> None:
        await stream.receive()
        assert stream._bulk is not None
        stream._bulk.close()
        await stream.send(chunk(2))
        with pytest.raises(PeerGone):
            while True:
                await stream.receive()

    stream = await stream_to(world, drop_bulk, Purpose.PASS)
    await stream.open_bulk()
    await stream.send(chunk(1))
    with pytest.raises(PeerGone):
        await stream.receive_into(memoryview(bytearray(10)))
    async with asyncio.timeout(5):
        with pytest.raises(PeerGone):
            while True:
                await stream.receive()
    stream.close()
