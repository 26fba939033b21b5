"""The in-memory network: crashes, partitions, relays, and one schedule per seed."""

from __future__ import annotations

import asyncio

import pytest

from gossamer.protocol.errors import PeerGone, TransportError, Unreachable
from gossamer.protocol.memory.conversation import FRAMING_BYTES, RETRANSMIT_S, Link
from gossamer.protocol.memory.network import MemoryNetwork, MemoryPeer
from gossamer.protocol.memory.virtual_time import run
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.protocol.peers import chunk, echo, expect_over, nobody, number_of, seeded
from tests.protocol.scripted import ScriptedNetwork

A, B, C = (seeded(number) for number in (1, 2, 3))


def pair(network: MemoryNetwork) -> tuple[MemoryPeer, MemoryPeer]:
    return network.start_peer(A.peer_id, nobody), network.start_peer(B.peer_id, echo)


@pytest.mark.parametrize("is_delivered", [False, True])
async def test_a_peer_crashes_at_the_kth_message_it_sends(is_delivered: bool) -> None:
    network = ScriptedNetwork(link=Link(latency_s=0.1))
    deaths = []
    network.on_death(deaths.append)
    a, _ = pair(network)
    network.kill_at(B.peer_id, sent=3, is_delivered=is_delivered)
    stream = await a.connect(B.peer_id, (), Purpose.MEET)
    for number in range(3):
        await stream.send(chunk(number))
        await asyncio.sleep(0.15)  # the third reply is in flight when its sender crashes
    arrived = []
    with pytest.raises(PeerGone):
        while True:
            arrived.append(await number_of(stream))
    assert arrived == ([0, 1, 2] if is_delivered else [0, 1])
    assert deaths == [B.peer_id]
    assert not network.is_up(B.peer_id)
    await network.close()


async def test_a_peer_crashes_when_its_kth_message_arrives() -> None:
    arrived: list[int] = []

    async def listen(purpose: Purpose, stream: Stream) -> None:
        while True:
            arrived.append(await number_of(stream))

    network = ScriptedNetwork(link=Link(latency_s=0.1))
    a = network.start_peer(A.peer_id, nobody)
    network.start_peer(B.peer_id, listen)
    network.kill_at(B.peer_id, received=3)
    stream = await a.connect(B.peer_id, (), Purpose.MEET)
    for number in range(3):
        await stream.send(chunk(number))
    await expect_over(stream)
    assert arrived == [0, 1]
    with pytest.raises(Unreachable):
        await a.connect(B.peer_id, (), Purpose.MEET)
    network.start_peer(B.peer_id, echo)
    again = await a.connect(B.peer_id, (), Purpose.MEET)
    await again.send(chunk(9))
    assert await number_of(again) == 9
    again.close()
    await asyncio.sleep(1)


async def test_a_short_partition_delays_streams_and_a_long_one_ends_them() -> None:
    network = MemoryNetwork(link=Link(latency_s=0.1, silence_s=30))
    a, _ = pair(network)
    loop = asyncio.get_running_loop()
    stream = await a.connect(B.peer_id, (), Purpose.MEET)
    await stream.send(chunk(0))
    assert await number_of(stream) == 0
    network.partition([A.peer_id], [B.peer_id])
    await stream.send(chunk(1))
    await asyncio.sleep(10)
    network.partition()
    assert await number_of(stream) == 1
    assert loop.time() < 11
    network.partition([A.peer_id])
    cut_at_s = loop.time()
    with pytest.raises(Unreachable):
        await a.connect(B.peer_id, (), Purpose.MEET)
    await expect_over(stream)
    assert loop.time() - cut_at_s == pytest.approx(30)
    network.partition()
    fresh = await a.connect(B.peer_id, (), Purpose.MEET)
    fresh.close()
    await asyncio.sleep(1)


async def test_a_full_peer_rejects_streams() -> None:
    network = ScriptedNetwork()
    a, _ = pair(network)
    network.refuse(B.peer_id)
    with pytest.raises(Unreachable, match="rejected"):
        await a.connect(B.peer_id, (), Purpose.MEET)
    network.refuse(B.peer_id, False)
    stream = await a.connect(B.peer_id, (), Purpose.MEET)
    stream.close()
    await asyncio.sleep(1)


async def test_a_dead_peer_opens_no_streams() -> None:
    network = MemoryNetwork()
    a, _ = pair(network)
    network.kill(A.peer_id)
    with pytest.raises(Unreachable):
        await a.connect(B.peer_id, (), Purpose.MEET)


async def test_a_peer_behind_a_router_is_reached_through_its_relay_or_its_own_connection() -> None:
    network = MemoryNetwork(link=Link(latency_s=0.1))
    a, b = pair(network)
    network.start_peer(C.peer_id, echo)
    network.hidden[B.peer_id] = (C.peer_id,)
    place = f"/ip4/192.0.2.3/tcp/1/p2p/{C.peer_id}/p2p-circuit"

    async def took_s(addresses: tuple[str, ...]) -> float:
        began_s = asyncio.get_running_loop().time()
        stream = await a.connect(B.peer_id, addresses, Purpose.MEET)
        stream.close()
        return asyncio.get_running_loop().time() - began_s

    with pytest.raises(Unreachable):
        await a.connect(B.peer_id, (), Purpose.MEET)
    assert await took_s((place,)) == pytest.approx(0.4)  # two network delays in each direction
    stream = await a.connect(B.peer_id, (place,), Purpose.MEET)
    network.kill(C.peer_id)
    with pytest.raises(PeerGone):
        await stream.receive()
    with pytest.raises(Unreachable):
        await a.connect(B.peer_id, (place,), Purpose.MEET)
    await network.dial(B.peer_id, A.peer_id)
    assert network.connected(A.peer_id) == [B.peer_id]
    assert await took_s(()) == pytest.approx(0.2)
    await network.close()


async def test_lost_frames_arrive_late_and_in_order() -> None:
    network = MemoryNetwork(link=Link(latency_s=0.01, loss=0.3))
    a, b = pair(network)
    stream = await a.connect(B.peer_id, (), Purpose.MEET)
    began_s = asyncio.get_running_loop().time()
    for number in range(20):
        await stream.send(chunk(number))
        assert await number_of(stream) == number
    assert asyncio.get_running_loop().time() - began_s > 20 * 0.02 + 5 * RETRANSMIT_S
    assert a.line.num_sent == b.line.num_received > 20 * FRAMING_BYTES
    await network.close()


def _gossip(seed: int) -> list[tuple[float, str, int]]:
    """Let peers call each other in a busy network with jitter; return a log of all arrivals."""
    log: list[tuple[float, str, int]] = []
    peers = [seeded(number) for number in range(1, 7)]

    async def listen(purpose: Purpose, stream: Stream) -> None:
        while True:
            number = await number_of(stream)
            log.append((asyncio.get_running_loop().time(), stream.partner.short(), number))
            await stream.send(chunk(number, 4000))

    async def talk(transport: MemoryPeer, number: int) -> None:
        for step in range(10):
            partner = peers[(number + 1 + step) % len(peers)]
            try:
                stream = await transport.connect(partner.peer_id, (), Purpose.MEET)
                for part in range(5):
                    await stream.send(chunk(part, 20_000))
                    await stream.receive()
                stream.close()
            except TransportError:
                await asyncio.sleep(0.5)

    async def main() -> None:
        network = ScriptedNetwork(seed, Link(latency_s=0.05, jitter_s=0.05, bytes_per_s=1e6))
        transports = [network.start_peer(peer.peer_id, listen) for peer in peers]
        network.kill_at(peers[2].peer_id, received=40)
        async with asyncio.TaskGroup() as group:
            for number, transport in enumerate(transports):
                group.create_task(talk(transport, number))
        await network.close()

    run(main())
    return log


def test_one_seed_gives_one_schedule() -> None:
    first = _gossip(1)
    assert len(first) > 100
    assert _gossip(1) == first
    assert _gossip(2) != first
