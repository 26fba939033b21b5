"""When a relayed connection is closed in favour of a direct one: against a scripted p2pd, under virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p import dialer as module
from gossamer.protocol.libp2p.dial_back import Reached
from gossamer.protocol.libp2p.dialer import AGAIN_S, MAX_FAILURES, OBSERVERS, Dialer, DirectRoute
from gossamer.protocol.libp2p.p2pd import Control
from tests.protocol.peers import seeded

PARTNER = seeded(1).peer_id
RELAYED = f"/ip4/5.5.0.1/tcp/4001/p2p/{seeded(2).peer_id}/p2p-circuit"
OPEN = "/ip4/5.6.0.1/tcp/4001"


class World(Control):
    """A p2pd with a relayed connection to the partner, which responds at some addresses."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.ends: dict[PeerId, str] = {PARTNER: RELAYED}
        self.answers: set[str] = set()
        self.tried: list[str] = []
        self.is_busy = False
        self.way = DirectRoute(self, Dialer(self, lambda: ("/ip4/192.168.1.9/tcp/1",)), lambda partner: self.is_busy)

    async def connected(self) -> dict[PeerId, str]:
        return dict(self.ends)

    async def disconnect(self, partner: PeerId) -> None:
        del self.ends[partner]

    async def try_to_reach(self, address: str) -> Reached:
        self.tried.append(address)
        return Reached.YES if address in self.answers else Reached.NO


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(module, "try_to_reach", world.try_to_reach)
    return world


async def test_a_partner_with_a_responding_direct_address_is_dialled_there(world: World) -> None:
    assert not await world.way.prepare(PARTNER, [RELAYED, OPEN]) and not world.tried, "the first attempt is not due yet"
    await asyncio.sleep(AGAIN_S[0])
    assert not await world.way.prepare(PARTNER, [RELAYED, OPEN, "/ip4/10.0.0.1/tcp/1"])
    assert world.tried == [OPEN], "a local address of another network must not be dialled"
    world.answers.add(OPEN)
    assert not await world.way.prepare(PARTNER, [RELAYED, OPEN]), "the next attempt is not due yet"
    await asyncio.sleep(2 * AGAIN_S[0])
    assert await world.way.prepare(PARTNER, [RELAYED, OPEN]) and PARTNER not in world.ends


async def test_a_host_at_which_nobody_answers_backs_off(world: World) -> None:
    partners = [seeded(number).peer_id for number in range(10, 10 + 2 * MAX_FAILURES)]
    world.ends = dict.fromkeys(partners, RELAYED)
    for pause_s in (AGAIN_S[0], 0.0):
        for partner in partners:
            assert not await world.way.prepare(partner, [OPEN])
        await asyncio.sleep(pause_s)
    assert world.tried == MAX_FAILURES * [OPEN]


async def test_a_connection_in_use_is_not_closed(world: World) -> None:
    world.answers.add(OPEN)
    world.is_busy = True
    for _ in range(3):
        assert not await world.way.prepare(PARTNER, [OPEN])
        await asyncio.sleep(AGAIN_S[1])
    world.is_busy = False
    assert await world.way.prepare(PARTNER, [OPEN])


async def test_with_enough_observers_the_connection_is_reopened_for_hole_punching(world: World) -> None:
    for number in range(OBSERVERS):
        await world.way.prepare(PARTNER, [RELAYED])
        await asyncio.sleep(AGAIN_S[0] * 2**number)
        assert not await world.way.prepare(PARTNER, [RELAYED])
        world.ends[seeded(10 + number).peer_id] = f"/ip4/6.{number}.0.1/tcp/4001"
    await asyncio.sleep(AGAIN_S[1])
    assert await world.way.prepare(PARTNER, [RELAYED])


async def test_a_punched_connection_is_used_by_the_next_call(world: World) -> None:
    world.ends[PARTNER] = "/ip4/5.5.6.1/tcp/4001"
    assert await world.way.prepare(PARTNER, [RELAYED]) and PARTNER in world.ends
