"""What every transport promises, checked on both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from protocol.errors import BadMessage, PeerGone, Unreachable
from protocol.identity import PeerId
from protocol.inbound import StreamCaps
from protocol.messages import Chunk
from protocol.transport import Purpose, Stream
from tests.protocol.worlds import World, chunk, in_memory, over_libp2p, seeded

Scenario = Callable[[World], Coroutine[Any, Any, None]]
MIB = 1 << 20
CHUNK = 256 * 1024


@pytest.fixture(params=[in_memory, over_libp2p], ids=["memory", "libp2p"])
def play(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    run: Callable[[Scenario], None] = request.param
    return run


async def nobody(purpose: Purpose, stream: Stream) -> None:
    raise AssertionError("nobody calls this peer")


async def echo(purpose: Purpose, stream: Stream) -> None:
    """Send back what comes until the partner leaves."""
    while True:
        await stream.send(await stream.receive())


async def number_of(stream: Stream) -> int:
    message = await stream.receive()
    assert isinstance(message, Chunk)
    return message.offset


def test_messages_arrive_in_order_both_ways(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(echo)
        stream = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)

        async def send() -> None:
            for number in range(200):
                await stream.send(chunk(number))

        sending = asyncio.create_task(send())
        assert [await number_of(stream) for _ in range(200)] == list(range(200))
        await sending
        assert stream.bytes_sent == stream.bytes_received > 200
        await stream.close()

    play(scenario)


def test_eight_megabytes_both_ways_at_once(play: Callable[[Scenario], None]) -> None:
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

    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(both)
        stream = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
        await asyncio.gather(send(stream), receive(stream))
        await stream.close()
        await ended.wait()

    play(scenario)


def test_both_ends_know_whom_they_talk_to(play: Callable[[Scenario], None]) -> None:
    seen: list[tuple[Purpose, PeerId]] = []

    async def note(purpose: Purpose, stream: Stream) -> None:
        seen.append((purpose, stream.partner))
        await echo(purpose, stream)

    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(note)
        for purpose in (Purpose.MEET, Purpose.FETCH):
            stream = await a.transport.connect(b.peer_id, b.addresses, purpose)
            assert stream.partner == b.peer_id
            await stream.send(chunk(1))
            await stream.receive()
            await stream.close()
        assert seen == [(Purpose.MEET, a.peer_id), (Purpose.FETCH, a.peer_id)]

    play(scenario)


async def expect_over(stream: Stream) -> None:
    with pytest.raises(PeerGone):
        await stream.receive()
    with pytest.raises(PeerGone):
        await stream.send(chunk(0))


def test_what_was_sent_before_closing_is_delivered(play: Callable[[Scenario], None]) -> None:
    heard: asyncio.Queue[int] = asyncio.Queue()

    async def slow(purpose: Purpose, stream: Stream) -> None:
        await asyncio.sleep(0.2)
        for _ in range(20):
            heard.put_nowait(await number_of(stream))
        await expect_over(stream)
        heard.put_nowait(-1)

    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(slow)
        stream = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
        for number in range(20):
            await stream.send(chunk(number))
        await stream.close()
        await stream.close()
        await expect_over(stream)
        assert [await heard.get() for _ in range(21)] == [*range(20), -1]

    play(scenario)


def test_the_other_side_may_close_too(play: Callable[[Scenario], None]) -> None:
    async def brief(purpose: Purpose, stream: Stream) -> None:
        await stream.receive()
        for number in range(20):
            await stream.send(chunk(number))
        await stream.close()
        await expect_over(stream)

    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(brief)
        stream = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
        await stream.send(chunk(0))
        assert [await number_of(stream) for _ in range(20)] == list(range(20))
        await expect_over(stream)
        await stream.close()

    play(scenario)


def test_closing_ends_a_receive_that_waits(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(echo)
        stream = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0.05)
        await stream.close()
        with pytest.raises(PeerGone):
            await waiting

    play(scenario)


def test_death_of_the_partner_is_seen_at_both_ends(play: Callable[[Scenario], None]) -> None:
    over = asyncio.Event()

    async def listen(purpose: Purpose, stream: Stream) -> None:
        await stream.receive()
        await expect_over(stream)
        over.set()

    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(listen)
        stream = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
        await stream.send(chunk(1))
        await asyncio.sleep(0.2)
        await world.kill(b)
        async with asyncio.timeout(5):
            await expect_over(stream)
            await over.wait()
        await stream.close()
        with pytest.raises(Unreachable):
            await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)

    play(scenario)


def test_garbage_is_a_bad_message(play: Callable[[Scenario], None]) -> None:
    answers: asyncio.Queue[str] = asyncio.Queue()

    async def rude(purpose: Purpose, stream: Stream) -> None:
        with pytest.raises(BadMessage):
            await stream.receive()
        await stream.send_frame(b"\xff" * 1000)  # type: ignore[attr-defined]
        answers.put_nowait("refused")

    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(rude)
        stream: Any = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
        await stream.send_frame(b"not a frame")
        assert await answers.get() == "refused"
        with pytest.raises(BadMessage):
            await stream.receive()
        await stream.close()

    play(scenario)


def test_streams_of_one_partner_are_few(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(echo, StreamCaps(per_purpose=2, total=3))
        streams = [await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET) for _ in range(2)]
        with pytest.raises(Unreachable):
            await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
        streams.append(await a.transport.connect(b.peer_id, b.addresses, Purpose.FETCH))
        with pytest.raises(Unreachable):
            await a.transport.connect(b.peer_id, b.addresses, Purpose.FETCH)
        for stream in streams:
            await stream.send(chunk(1))
            assert await number_of(stream) == 1
        await streams[0].close()
        await asyncio.sleep(0.5)
        again = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
        for stream in (again, *streams[1:]):
            await stream.close()

    play(scenario)


def test_a_failing_handler_ends_only_its_stream(play: Callable[[Scenario], None]) -> None:
    async def fail(purpose: Purpose, stream: Stream) -> None:
        if await number_of(stream) == 0:
            raise RuntimeError("a bug")
        await stream.send(chunk(7))

    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(fail)
        broken = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
        await broken.send(chunk(0))
        await expect_over(broken)
        await broken.close()
        fine = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
        await fine.send(chunk(1))
        assert await number_of(fine) == 7
        await fine.close()

    play(scenario)


def test_a_cancelled_stream_can_be_closed_and_harms_no_other(play: Callable[[Scenario], None]) -> None:
    over: asyncio.Queue[str] = asyncio.Queue()

    async def deaf(purpose: Purpose, stream: Stream) -> None:
        await asyncio.sleep(0.5)
        with pytest.raises(PeerGone):
            while True:
                await stream.receive()
        over.put_nowait("over")

    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(deaf)
        for _ in range(2):
            stream = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    while True:  # more than the lane holds: some send will wait, and be cancelled
                        await stream.send(chunk(1, CHUNK))
            with pytest.raises((PeerGone, TimeoutError)):
                async with asyncio.timeout(0.05):
                    await stream.receive()
            await stream.close()
            async with asyncio.timeout(20):
                assert await over.get() == "over"

    play(scenario)


def test_a_sender_waits_for_a_partner_that_does_not_read(play: Callable[[Scenario], None]) -> None:
    async def deaf(purpose: Purpose, stream: Stream) -> None:
        await asyncio.Event().wait()

    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(deaf)
        stream = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
        while True:
            try:
                async with asyncio.timeout(0.5):
                    await stream.send(chunk(1, CHUNK))
            except TimeoutError:
                break
            assert stream.bytes_sent < 64 * MIB
        await stream.close()

    play(scenario)


def test_a_silent_opener_is_closed(play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.inbound.FIRST_FRAME_S", 0.3)

    async def scenario(world: World) -> None:
        a, b = await world.peer(nobody), await world.peer(nobody)
        stream = await a.transport.connect(b.peer_id, b.addresses, Purpose.MEET)
        async with asyncio.timeout(5):
            await expect_over(stream)
        await stream.close()

    play(scenario)


def test_a_peer_that_is_not_there_is_unreachable(play: Callable[[Scenario], None]) -> None:
    async def scenario(world: World) -> None:
        a = await world.peer(nobody)
        for partner in (seeded(999).peer_id, a.peer_id):
            with pytest.raises(Unreachable):
                await a.transport.connect(partner, ("/ip4/127.0.0.1/tcp/9",), Purpose.MEET)

    play(scenario)
