"""Reachability from dial-back results, and the choice of relays: against a scripted p2pd, under virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p import reachability
from gossamer.protocol.libp2p.dial_back import Answer, Reached
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.libp2p.reachability import Reachability
from gossamer.protocol.memory import virtual_time
from tests.protocol.peers import seeded

PARTNERS = [seeded(number).peer_id for number in range(1, 8)]
SEEN = "/ip4/5.5.0.9/tcp/4001"
PLACE = f"/ip4/5.5.0.1/tcp/4001/p2p/{PARTNERS[0]}/p2p-circuit"


def relay(number: int) -> str:
    return f"/ip4/5.5.0.{number + 1}/tcp/4001/p2p/{PARTNERS[number]}"


class World(Control):
    """A p2pd, and the partners' dial-back replies."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.partners: dict[PeerId, Answer | None] = {}
        self.ends: dict[PeerId, str] = {}
        self.own: tuple[str, ...] = ()
        self.gone: set[PeerId] = set()

    def set_answer(self, number: int, reached: Reached, *, relays: bool = False, end: str = "/ip4/5.5.0.1/tcp/1") -> None:
        self.partners[PARTNERS[number]] = Answer(reached, SEEN, relay(number) if relays else "")
        self.ends[PARTNERS[number]] = end

    async def connected(self) -> dict[PeerId, str]:
        return {peer: self.ends[peer] for peer in self.partners if peer not in self.gone}

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        return PARTNERS[0], self.own

    async def connect(self, partner: PeerId, addresses: object) -> None:
        if partner in self.gone:
            raise Unreachable("gone")

    async def ask(self, control: Control, partner: PeerId, port: int) -> Answer:
        assert port == 4001
        if (answer := self.partners[partner]) is None:
            raise Unreachable("knows no such question")
        return answer


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(reachability, "ask", made.ask)
    return made


def run(test: Callable[[], Awaitable[None]]) -> None:
    virtual_time.run(test())  # type: ignore[arg-type]


async def within(seconds: float, work: Awaitable[str]) -> str:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        return ""


def test_a_peer_that_partners_reach_is_open(world: World) -> None:
    async def test() -> None:
        world.set_answer(0, Reached.YES, relays=True)
        known = Reachability()
        assert await within(60, known.until_role_changes(world, 4001)) == ""
        assert (known.is_open, known.open_at, known.through) == (True, SEEN, ())

    run(test)


def test_an_unreachable_peer_uses_its_partners_as_relays(world: World) -> None:
    async def test() -> None:
        world.set_answer(0, Reached.NO, relays=True)
        world.set_answer(1, Reached.NO)
        known = Reachability()
        assert "relay" in await within(5, known.until_role_changes(world, 4001))
        assert (known.is_open, known.open_at, known.through) == (False, "", (relay(0),))

    run(test)


def test_without_partners_the_reachability_stays_unknown(world: World) -> None:
    async def test() -> None:
        world.set_answer(0, Reached.NO, relays=True, end="/ip4/192.168.1.7/tcp/1")
        world.set_answer(1, Reached.NO, relays=True, end=PLACE)
        world.set_answer(2, Reached.NOT_TRIED, relays=True)
        world.set_answer(3, Reached.NO)
        world.partners[PARTNERS[3]] = None
        known = Reachability()
        assert await within(60, known.until_role_changes(world, 4001)) == ""
        assert known.is_open is None

    run(test)


def test_one_malicious_partner_has_no_effect(world: World) -> None:
    async def test() -> None:
        for number in range(4):
            world.set_answer(number, Reached.YES if number else Reached.NO)
        known = Reachability()
        await within(1000, known.until_role_changes(world, 4001))
        assert known.is_open is True

    run(test)


def test_a_relay_that_appears_later_is_used(world: World) -> None:
    async def test() -> None:
        world.set_answer(0, Reached.NO)
        known = Reachability()
        assert await within(30, known.until_role_changes(world, 4001)) == ""
        world.set_answer(1, Reached.NO, relays=True)
        assert await within(10, known.until_role_changes(world, 4001))
        assert known.through == (relay(1),)

    run(test)


def test_a_dead_relay_is_replaced_within_half_a_minute(world: World) -> None:
    async def test() -> None:
        world.own = (PLACE,)
        world.set_answer(0, Reached.NO, relays=True)
        world.set_answer(1, Reached.NO, relays=True)
        known = Reachability((relay(0),))
        assert await within(400, known.until_role_changes(world, 4001)) == "", "no change is needed"
        world.gone.add(PARTNERS[0])
        world.own = ()
        assert await within(20, known.until_role_changes(world, 4001))
        assert known.through == (relay(1),)

    run(test)


def test_without_another_relay_it_retries_the_old_one(world: World) -> None:
    async def test() -> None:
        world.gone.add(PARTNERS[0])
        known = Reachability((relay(0),))
        assert await within(60, known.until_role_changes(world, 4001)) == ""
        world.gone.clear()
        assert await within(20, known.until_role_changes(world, 4001)), "p2pd requests a new reservation when it restarts"
        assert known.through == (relay(0),)

    run(test)


def test_full_relays_cause_restarts_with_back_off(world: World) -> None:
    async def test() -> None:
        known, began_s, num_starts = Reachability((relay(0),)), asyncio.get_running_loop().time(), 0
        while asyncio.get_running_loop().time() < began_s + 3600.0:
            num_starts += bool(await within(3600.0, known.until_role_changes(world, 4001)))
        assert 10 < num_starts < 20
        world.own = (PLACE,)
        assert await within(60, known.until_role_changes(world, 4001)) == "", "the relay gave a reservation"
        world.own = ()
        assert await within(10, known.until_role_changes(world, 4001)), "the timeout should start again"

    run(test)


def test_a_peer_that_becomes_reachable_drops_its_relays(world: World) -> None:
    async def test() -> None:
        world.own = (PLACE,)
        world.set_answer(1, Reached.YES)
        known = Reachability((relay(0),))
        assert "no relay" in await within(20, known.until_role_changes(world, 4001))
        assert known.through == ()

    run(test)
