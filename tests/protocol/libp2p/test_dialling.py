"""What strangers' records have us dial: only where somebody can be, and no host that many have named in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest

from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p import dialling as module
from gossamer.protocol.libp2p.dialling import BACK_OFF_S, MAX_FAILURES, Dialling
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.nearby import seal
from tests.protocol.peers import seeded

VICTIM, OTHER = "/ip4/8.8.8.8/tcp/{}", "/ip4/9.9.9.9/tcp/1"
RELAY = f"{OTHER}/p2p/{seeded(99).peer_id}/p2p-circuit"


class Network:
    """Nobody is at any address but `there`."""

    def __init__(self) -> None:
        self.dialled: list[str] = []
        self.there: set[str] = set()

    async def connect(self, partner: PeerId, addresses: Sequence[str]) -> None:
        self.dialled += addresses
        if not self.there & set(addresses):
            raise Unreachable("nobody")


def play(test: Callable[[Network, Dialling], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        network: Any = Network()
        await test(network, Dialling(network, lambda: ("/ip4/192.168.1.9/tcp/1", "/ip4/127.0.0.1/tcp/1")))

    virtual_time.run(main())


async def look_for(dialling: Dialling, number: int, *addresses: str) -> bool:
    try:
        await dialling.connect(seeded(number).peer_id, addresses)
    except Unreachable:
        return False
    return True


def test_a_host_that_many_records_name_is_left_alone_for_a_while() -> None:
    async def test(network: Network, dialling: Dialling) -> None:
        for number in range(100):
            assert not await look_for(dialling, number, VICTIM.format(1 + number))
        assert len(network.dialled) == MAX_FAILURES
        await look_for(dialling, 200, VICTIM.format(7), RELAY)
        assert network.dialled[MAX_FAILURES:] == [RELAY], "other ways to a peer stay open"
        await asyncio.sleep(BACK_OFF_S + 1)
        await look_for(dialling, 300, VICTIM.format(1))
        assert network.dialled[-1] == VICTIM.format(1)

    play(test)


def test_a_peer_that_is_often_away_harms_only_itself() -> None:
    async def test(network: Network, dialling: Dialling) -> None:
        for _ in range(3 * MAX_FAILURES):
            await look_for(dialling, 1, VICTIM.format(1))
        network.there = {VICTIM.format(2)}
        assert await look_for(dialling, 2, VICTIM.format(2))

    play(test)


def test_a_host_at_which_somebody_is_starts_anew() -> None:
    async def test(network: Network, dialling: Dialling) -> None:
        for number in range(MAX_FAILURES - 1):
            await look_for(dialling, number, VICTIM.format(1))
        network.there = {VICTIM.format(2)}
        assert await look_for(dialling, 50, VICTIM.format(2))
        for number in range(60, 60 + MAX_FAILURES - 1):
            await look_for(dialling, number, VICTIM.format(1))
        assert await look_for(dialling, 51, VICTIM.format(2))

    play(test)


def test_a_dead_relays_clients_do_not_count_against_it() -> None:
    async def test(network: Network, dialling: Dialling) -> None:
        for number in range(3 * MAX_FAILURES):
            await look_for(dialling, number, RELAY)
        assert len(network.dialled) == 3 * MAX_FAILURES

    play(test)


def test_a_local_network_is_dialled_only_from_one_like_it() -> None:
    async def test(network: Network, dialling: Dialling) -> None:
        network.there = {"/ip4/192.168.7.7/tcp/1", "/ip4/10.0.0.1/tcp/1", "/ip6/fd00::1/tcp/1"}
        assert await look_for(dialling, 1, "/ip4/192.168.7.7/tcp/1")
        assert not await look_for(dialling, 2, "/ip4/10.0.0.1/tcp/1")
        assert not await look_for(dialling, 3, "/ip6/fd00::1/tcp/1")
        assert network.dialled == ["/ip4/192.168.7.7/tcp/1"]

    play(test)


def test_this_machine_is_dialled_only_by_who_is_nowhere_else() -> None:
    async def test(network: Network, dialling: Dialling) -> None:
        network.there = {"/ip4/127.0.0.1/tcp/22"}
        assert not await look_for(dialling, 1, "/ip4/127.0.0.1/tcp/22"), "a stranger's word for a service of ours"
        here = Dialling(cast(Control, network), lambda: ("/ip4/127.0.0.1/tcp/1",))
        assert await look_for(here, 1, "/ip4/127.0.0.1/tcp/22")

    play(test)


def test_a_machine_of_the_local_network_is_left_alone_too() -> None:
    async def test(network: Network, dialling: Dialling) -> None:
        for number in range(3 * MAX_FAILURES):
            assert not await look_for(dialling, number, f"/ip4/192.168.1.1/tcp/{1 + number}")
        assert len(network.dialled) == MAX_FAILURES

    play(test)


def test_what_is_sealed_is_dialled_by_those_behind_the_same_router() -> None:
    async def test(network: Network, dialling: Dialling) -> None:
        local = "/ip4/192.168.7.7/tcp/1"
        for host, number in (("5.5.6.1", 1), ("5.5.6.2", 2)):
            sealed = seal([local], seeded(number).peer_id, host)
            with_host = Dialling(cast(Control, network), lambda: ("/ip4/192.168.1.9/tcp/1",), lambda: "5.5.6.1")
            await look_for(with_host, number, sealed, RELAY)
        assert network.dialled == [local, RELAY, RELAY]

    play(test)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOSTS", 5)

    async def test(network: Network, dialling: Dialling) -> None:
        for number in range(50):
            await look_for(dialling, number, f"/ip4/8.8.8.{number}/tcp/1")
        assert len(dialling._in_vain) == 5

    play(test)
