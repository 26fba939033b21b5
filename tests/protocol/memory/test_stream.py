"""How a stream in memory ends. The rest is in the transport contract."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.errors import PeerGone
from protocol.memory.link import Line, Link
from protocol.memory.stream import Conversation
from protocol.memory.virtual_time import run
from tests.protocol.peers import chunk, expect_over, number_of, seeded

PEERS = seeded(1).peer_id, seeded(2).peer_id


def conversation(**link: Any) -> Conversation:
    line = Link(latency_s=1.0, **link)
    return Conversation(PEERS, (Line(line), Line(line)), lambda: 0.0, lambda peer, doom: None)


def test_a_goodbye_comes_after_what_was_sent() -> None:
    async def main() -> None:
        talk = conversation()
        forgotten: list[int] = []
        talk.on_over(0, lambda: forgotten.append(0))
        talk.on_over(1, lambda: forgotten.append(1))
        a, b = talk.streams
        await a.send(chunk(1))
        await a.close()
        await a.close()
        assert forgotten == [0]
        assert await number_of(b) == 1
        await expect_over(b)
        await b.close()
        assert forgotten == [0, 1]

    run(main())


def test_a_dead_peer_stops_hearing_at_once_and_its_partner_a_moment_later() -> None:
    async def main() -> None:
        talk = conversation()
        for side in (0, 1):
            talk.on_over(side, lambda: None)
        a, b = talk.streams
        await a.send(chunk(1))
        await b.send(chunk(2))
        talk.die(PEERS[0], is_delivered=False)
        await expect_over(a)
        with pytest.raises(PeerGone, match="gone"):
            await b.receive()
        assert asyncio.get_running_loop().time() == 1.0

    run(main())


def test_bytes_are_those_of_the_frames() -> None:
    async def main() -> None:
        a, b = conversation().streams
        await a.send(chunk(1, 1000))
        await b.receive()
        assert a.bytes_sent == b.bytes_received > 1000
        assert b.bytes_sent == a.bytes_received == 0
        assert a.partner == PEERS[1]

    run(main())
