"""The rounds in which a peer keeps up with its swarm: as often as it is of use, and no oftener because strangers want it so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from gossamer.peer.node import membership_watch
from gossamer.peer.node.anti_entropy import AGAIN_S, EVERY_S, MANY_PEERS, QUICK_ROUNDS
from gossamer.protocol.identity import PeerId
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.peer.neighbours import somebody
from tests.swarm.healing import RUN, Resident


@pytest.fixture(autouse=True)
def no_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_watch, "ROUND_S", 1e9)


async def silent(purpose: Purpose, stream: Stream) -> None:
    await asyncio.sleep(1000.0)


def calls_of(
    prepare: Callable[[MemoryNetwork, Resident], Awaitable[None]], within_s: float, num_bootstraps: int = 1
) -> list[tuple[float, PeerId]]:
    """Return when a peer called whom, once it was prepared."""

    async def main() -> list[tuple[float, PeerId]]:
        network, calls = MemoryNetwork(), list[tuple[float, PeerId]]()
        bootstraps = [Resident(network, number).start() for number in range(1, num_bootstraps + 1)]
        resident = Resident(network, 100, [bootstrap.bootstrap for bootstrap in bootstraps])
        real = network.open

        async def noted(caller: object, partner: PeerId, *rest: object) -> Stream:
            if caller is network.peers.get(resident.peer_id):
                calls.append((asyncio.get_running_loop().time(), partner))
            return await real(caller, partner, *rest)  # type: ignore[arg-type]

        network.open = noted  # type: ignore[method-assign]
        resident.start()
        await prepare(network, resident)
        calls.clear()
        await asyncio.sleep(within_s)
        for one in (resident, *bootstraps):
            one.stop()
        await network.close()
        return calls

    return virtual_time.run(main())


def record_of(network: MemoryNetwork, number: int, lifetime_s: int = 300) -> MemberRecord:
    who = somebody(number)
    unsigned = MemberRecord(RUN.run_id, who.peer_id, ("/ip4/192.0.2.7/tcp/4001",), 0, False, 1, int(network.now_s()) + lifetime_s)
    return unsigned.signed(who)


def rounds(calls: list[tuple[float, PeerId]]) -> list[float]:
    """Return when rounds began."""
    times = sorted({at_s for at_s, _ in calls})
    return [at_s for before_s, at_s in zip([-1.0, *times], times, strict=False) if at_s - before_s > 1.0]


def test_a_new_peer_announces_itself_though_it_knows_all_others() -> None:
    async def look(network: MemoryNetwork, resident: Resident) -> None:
        await asyncio.sleep(AGAIN_S / 2)
        assert len(resident.book.announced(asyncio.get_running_loop().time())) == 1

    assert len(rounds(calls_of(look, (QUICK_ROUNDS - 1) * AGAIN_S))) == QUICK_ROUNDS - 1


def test_a_connected_peer_makes_two_rounds_a_minute() -> None:
    async def idle(network: MemoryNetwork, resident: Resident) -> None:
        await asyncio.sleep(100.0)

    assert 600 / EVERY_S[1] - 2 <= len(rounds(calls_of(idle, 600.0))) <= 600 / EVERY_S[0] + 2


def test_invented_peers_cost_no_rounds() -> None:
    async def flood(network: MemoryNetwork, resident: Resident) -> None:
        async def make_up() -> None:
            for number in range(200, 1000):
                resident.peer.member.gossip.take(record_of(network, number))
                await asyncio.sleep(1.0)

        resident.flood = asyncio.create_task(make_up())  # type: ignore[attr-defined]
        await asyncio.sleep(10.0)

    a_while_s = (QUICK_ROUNDS + 1) * 2 * AGAIN_S + EVERY_S[0]
    assert len(rounds(calls_of(flood, 5 * a_while_s))) <= 5 * (QUICK_ROUNDS + 2)


def test_an_isolated_peer_retries_its_bootstraps() -> None:
    async def alone(network: MemoryNetwork, resident: Resident) -> None:
        for peer in list(network.peers):
            if peer != resident.peer_id:
                network.kill(peer)
        await asyncio.sleep(400.0)

    calls = calls_of(alone, 120.0, num_bootstraps=3)
    assert len({partner for _, partner in calls}) == 3


def test_in_a_large_swarm_a_bootstrap_is_called_less_often() -> None:
    async def many(network: MemoryNetwork, resident: Resident) -> None:
        for number in range(200, 200 + 10 * MANY_PEERS):
            resident.book.learn(replace(record_of(network, number), expires_s=int(network.now_s()) + 10**6), 0.0)
        await asyncio.sleep(60.0)

    calls = calls_of(many, 1500.0)
    num_rounds, bootstrap = len(rounds(calls)), Resident(MemoryNetwork(), 1).peer_id
    assert 0 < sum(partner == bootstrap for _, partner in calls) < num_rounds / 4


def test_a_banned_peer_is_not_called() -> None:
    async def ban(network: MemoryNetwork, resident: Resident) -> None:
        await asyncio.sleep(10.0 + AGAIN_S / 2)
        for peer in list(network.peers):
            resident.book.ban(peer, asyncio.get_running_loop().time(), "a test")

    assert not calls_of(ban, 200.0)
