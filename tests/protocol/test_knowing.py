"""The ideal directory of the test swarms: records are shared, replaced and forgotten, and do not cross a partition."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gossamer.protocol.errors import BadMessage, BadSignature, TransportError
from gossamer.protocol.identity import Identity
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.memory.virtual_time import run
from gossamer.protocol.messages.records import MemberRecord
from tests.protocol.knowing import KnowingNetwork
from tests.protocol.peers import echo, nobody, seeded
from tests.protocol.samples import RECORD

A, B, C = (seeded(number) for number in (1, 2, 3))


def pair(network: KnowingNetwork) -> None:
    network.start_peer(A.peer_id, nobody)
    network.start_peer(B.peer_id, echo)


def record(author: Identity, network: KnowingNetwork, sequence: int = 1, lifetime_s: int = 60) -> MemberRecord:
    made = replace(RECORD, peer_id=author.peer_id, addresses=(), sequence=sequence, expires_s=int(network.now_s()) + lifetime_s)
    return replace(made, credential=None, signature=b"").signed(author)


def test_records_are_shared_replaced_and_forgotten() -> None:
    async def main() -> None:
        network = KnowingNetwork(link=Link(latency_s=0.1))
        pair(network)
        a, b = network.peers[A.peer_id], network.peers[B.peer_id]
        first, second = record(A, network), record(A, network, sequence=2)
        await a.announce(second)
        await a.announce(first)
        assert await b.members() == [second]
        await asyncio.sleep(60)
        assert await b.members() == []

    run(main())


def test_invalid_records_are_not_published() -> None:
    async def main() -> None:
        network = KnowingNetwork()
        pair(network)
        a = network.peers[A.peer_id]
        with pytest.raises(BadMessage):
            await a.announce(record(A, network, lifetime_s=10_000))
        with pytest.raises(BadSignature):
            await a.announce(replace(record(A, network), global_step=5))

    run(main())


def test_records_do_not_cross_a_partition() -> None:
    async def main() -> None:
        network = KnowingNetwork()
        pair(network)
        network.start_peer(C.peer_id, nobody)
        a, b, c = (network.peers[peer.peer_id] for peer in (A, B, C))
        network.partition([A.peer_id, B.peer_id], [C.peer_id])
        await a.announce(record(A, network))
        assert [seen.peer_id for seen in await b.members()] == [A.peer_id]
        assert await c.members() == []
        with pytest.raises(TransportError):
            await c.announce(record(C, network))
        network.partition()
        assert len(await c.members()) == 1

    run(main())
