"""What others may ask about themselves, and how little of us they can make of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from peer.node.mirror import ALL_ECHO_BYTES, ECHO_BYTES, GREETING, KNOCKS_AT_ONCE, REMEMBERED, Budget, Mirror, answers
from protocol.errors import RefusalCode, Refused
from protocol.identity import Identity
from protocol.limits import CHUNK_BYTES
from protocol.messages.frames import to_frame
from protocol.messages.messages import Chunk, Contents, ContentsKind, Knock, Part
from protocol.messages.sighting import Sighting
from tests.protocol.samples import ADDRESS, BOB, DIGEST, FETCH

HERE = "/ip4/127.0.0.1/tcp/50000"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(GREETING)
    await reader.read()
    writer.close()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def knock(mirror: Mirror, observed: str, port: int) -> Knock:
    return Sighting.from_bytes(await mirror.sighting(observed, port)).knock


async def served(answer: Answer, ask: Callable[[int], Coroutine[Any, Any, Any]], host: str = "127.0.0.1") -> Any:
    """Ask while somebody listens, with the port where."""
    conversations: list[asyncio.Task[None]] = []

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        conversations.append(asyncio.create_task(answer(reader, writer)))

    async with await asyncio.start_server(begin, host, 0) as server:
        said = await ask(server.sockets[0].getsockname()[1])
        await asyncio.gather(*conversations)
        await asyncio.sleep(0)  # the last connection's end
        return said


def test_an_asker_hears_from_where_it_comes_and_what_time_it_is() -> None:
    async def test() -> None:
        seen = Sighting.from_bytes(await Mirror(lambda: 1_800_000_000.5).sighting(HERE, 0))
        assert seen == Sighting(HERE, 1_800_000_000_500, Knock.NOT_TRIED)
        relayed = Sighting.from_bytes(await Mirror(time.time).sighting(f"{ADDRESS}/p2p-circuit", 4001))
        assert (relayed.observed, relayed.knock) == ("", Knock.NOT_TRIED), "there is no address to try"

    asyncio.run(test())


@pytest.mark.parametrize(("answer", "expected"), [(greet, Knock.ANSWERED), (hang_up, Knock.SILENT)], ids=["a peer", "another program"])
def test_the_port_is_tried_where_the_asker_comes_from(answer: Answer, expected: Knock) -> None:
    assert asyncio.run(served(answer, lambda port: knock(Mirror(time.time), HERE, port))) is expected


def test_a_port_where_nobody_listens() -> None:
    async def test() -> None:
        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        assert await knock(Mirror(time.time), HERE, port) is Knock.SILENT

    asyncio.run(test())


def test_one_that_never_says_a_word_is_not_waited_for() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    assert not asyncio.run(served(silent, lambda port: answers("127.0.0.1", port, 0.05)))


def test_a_network_is_tried_seldom_whoever_asks() -> None:
    async def test(port: int) -> None:
        mirror = Mirror(time.time)
        assert [await knock(mirror, f"/ip4/127.0.0.{host}/tcp/1", port) for host in (1, 1, 2)] == [
            Knock.ANSWERED,
            Knock.NOT_TRIED,
            Knock.NOT_TRIED,
        ]

    asyncio.run(served(greet, test))


def test_few_are_tried_at_once() -> None:
    arrived: list[asyncio.StreamWriter] = []
    full = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.append(writer)
        if len(arrived) == KNOCKS_AT_ONCE:
            full.set()
        await reader.read()
        writer.close()

    async def test(port: int) -> None:
        mirror = Mirror(time.time)
        full.clear()
        asking = [asyncio.create_task(knock(mirror, f"/ip4/127.0.{number}.1/tcp/1", port)) for number in range(KNOCKS_AT_ONCE)]
        await full.wait()
        assert await knock(mirror, "/ip4/127.1.0.1/tcp/1", port) is Knock.NOT_TRIED
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(served(hold, test, "0.0.0.0"))


def test_echoes_are_counted_per_partner_and_in_all() -> None:
    async def test() -> None:
        mirror, num_allowed = Mirror(time.time), ECHO_BYTES // CHUNK_BYTES
        for number in range(ALL_ECHO_BYTES // ECHO_BYTES):
            partner = Identity(number.to_bytes(32, "little")).peer_id
            for _ in range(num_allowed):
                mirror.allow_echo(partner, CHUNK_BYTES)
            with pytest.raises(Refused) as caught:
                mirror.allow_echo(partner, CHUNK_BYTES)
            assert caught.value.code is RefusalCode.BUSY
        with pytest.raises(Refused):
            mirror.allow_echo(BOB.peer_id, 1)

    asyncio.run(test())


def test_a_budget_is_whole_again_after_its_time_and_bounded_in_memory() -> None:
    budget = Budget(2, 10**9, 60.0)
    assert [budget.take("a", 1, 0.0), budget.take("a", 2, 1.0), budget.take("a", 1, 2.0)] == [True, False, True]
    assert not budget.take("a", 1, 59.0) and budget.take("a", 1, 61.0)
    assert sum(budget.take(key, 1, 62.0) for key in range(2 * REMEMBERED)) == REMEMBERED - 1


def test_an_answer_is_never_larger_than_what_was_asked() -> None:
    seen = Sighting("/ip6/2001:db8:1234:5678:9abc:def0:1234:5678/tcp/65535", 1_800_000_000_000, Knock.ANSWERED).to_bytes()
    header = Contents(ContentsKind.SIGHTING, len(seen), DIGEST).signed(BOB, *FETCH.asked)
    assert len(to_frame(header)) + len(to_frame(Chunk(Part.CONTENTS, 0, seen))) < len(to_frame(FETCH))
