"""Reachability from dial-back results, and the choice of relays: against a scripted p2pd, under virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from pathlib import Path

import pytest

from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p import reachability
from gossamer.protocol.libp2p.dial_back import Answer, Reached
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.libp2p.reachability import Reachability
from tests.protocol.peers import seeded

PARTNERS = [seeded(number).peer_id for number in range(1, 17)]
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

    def set_answer(
        self, number: int, reached: Reached, *, relays: bool = False, end: str = "/ip4/5.5.0.1/tcp/1", seen_at: str = SEEN
    ) -> None:
        self.partners[PARTNERS[number]] = Answer(reached, seen_at, relay(number) if relays else "")
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


async def within(seconds: float, work: Awaitable[str]) -> str:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        return ""


async def test_a_peer_that_partners_reach_is_open(world: World) -> None:
    world.set_answer(0, Reached.YES, relays=True)
    known = Reachability()
    assert await within(60, known.until_role_changes(world, 4001)) == ""
    assert (known.is_open, known.open_at, known.through) == (True, SEEN, ())


async def test_an_unreachable_peer_uses_its_partners_as_relays(world: World) -> None:
    world.set_answer(0, Reached.NO, relays=True)
    world.set_answer(1, Reached.NO)
    known = Reachability()
    assert "relay" in await within(5, known.until_role_changes(world, 4001))
    assert (known.is_open, known.open_at, known.through) == (False, "", (relay(0),))


async def test_without_partners_the_reachability_stays_unknown(world: World) -> None:
    world.set_answer(0, Reached.NO, relays=True, end="/ip4/192.168.1.7/tcp/1")
    world.set_answer(1, Reached.NO, relays=True, end=PLACE)
    world.set_answer(2, Reached.NOT_TRIED, relays=True)
    world.set_answer(3, Reached.NO)
    world.partners[PARTNERS[3]] = None
    world.set_answer(4, Reached.NO, relays=True, end="")
    known = Reachability()
    assert await within(60, known.until_role_changes(world, 4001)) == ""
    assert known.is_open is None


async def test_one_malicious_partner_has_no_effect(world: World) -> None:
    for number in range(4):
        world.set_answer(number, Reached.YES if number else Reached.NO)
    known = Reachability()
    await within(1000, known.until_role_changes(world, 4001))
    assert known.is_open is True


async def test_the_identities_of_one_network_have_one_vote(world: World) -> None:
    for number in range(2, 14):
        world.set_answer(number, Reached.NO, relays=True, end=f"/ip4/6.6.0.{number}/tcp/1")
    for number in range(2):
        world.set_answer(number, Reached.YES, end=f"/ip4/5.{number}.0.1/tcp/1")
    known = Reachability()
    assert await within(2000, known.until_role_changes(world, 4001)) == "", "identities are free: p2pd would restart at their will"
    assert known.is_open is True


async def test_strangers_have_no_vote_beside_a_member(world: World) -> None:
    for number in range(1, 8):
        world.set_answer(number, Reached.NO, relays=True, end=f"/ip4/6.{number}.0.1/tcp/1")
    known, members = Reachability(), {PARTNERS[0]}
    assert await within(20, known.until_role_changes(world, 4001, members.__contains__))
    assert known.is_open is False, "without a member they are all there is to ask"
    world.set_answer(0, Reached.YES)
    assert "no relay" in await within(20, known.until_role_changes(world, 4001, members.__contains__))
    assert known.is_open is True


@pytest.mark.parametrize("claim", ["/ip4/198.51.100.7/tcp/4001", "/ip4/5.5.0.9/tcp/22"])
async def test_one_partner_does_not_choose_the_announced_address(world: World, claim: str) -> None:
    for number in range(3):
        world.set_answer(number, Reached.YES, end=f"/ip4/5.{number}.0.1/tcp/1", seen_at=SEEN if number else claim)
    known, claimed = Reachability(), set[str]()
    tracking = asyncio.create_task(known.until_role_changes(world, 4001))
    for _ in range(1000):
        await asyncio.sleep(1.0)
        claimed.add(known.open_at)
    tracking.cancel()
    assert claimed <= {"", SEEN}
    assert known.open_at == SEEN


async def test_a_second_network_does_not_change_what_the_first_one_observes(world: World) -> None:
    known = Reachability()
    world.set_answer(0, Reached.YES, end="/ip4/5.1.0.1/tcp/1")
    await within(20, known.until_role_changes(world, 4001))
    world.set_answer(1, Reached.YES, end="/ip4/5.2.0.1/tcp/1", seen_at="/ip4/9.9.9.9/tcp/4001")
    await within(1000, known.until_role_changes(world, 4001))
    assert known.public_host == "5.5.0.9" and known.open_at == SEEN
    world.set_answer(2, Reached.YES, end="/ip4/5.3.0.1/tcp/1", seen_at="/ip4/9.9.9.9/tcp/4001")
    await within(1000, known.until_role_changes(world, 4001))
    assert known.public_host == "9.9.9.9", "two of three are more"


@pytest.mark.parametrize("seed", range(4))
async def test_the_identities_of_one_network_are_one_relay_whatever_addresses_they_name(seed: int, world: World) -> None:
    random.seed(seed)
    known, alone = Reachability(), f"/ip4/20.15.0.1/tcp/4001/p2p/{PARTNERS[15]}"
    for reached in (Reached.NOT_TRIED, Reached.NO):  # first they only name themselves
        for number, partner in enumerate(PARTNERS):
            world.partners[partner] = Answer(reached, SEEN, f"/ip4/20.{number}.0.1/tcp/4001/p2p/{partner}")
            world.ends[partner] = "/ip4/9.9.0.1/tcp/1" if number == 15 else "/ip4/5.5.0.1/tcp/1"
        await within(30, known.until_role_changes(world, 4001))
    assert alone in known.through and len(known.through) == 2


async def test_relays_are_of_different_networks_where_there_are_several(world: World) -> None:
    other = f"/ip4/9.9.0.1/tcp/4001/p2p/{PARTNERS[15]}"
    known = Reachability()
    for reached in (Reached.NOT_TRIED, Reached.NO):  # first they only name themselves
        for number in range(15):
            world.set_answer(number, reached, relays=True)
        world.partners[PARTNERS[15]], world.ends[PARTNERS[15]] = Answer(reached, SEEN, other), "/ip4/9.9.0.1/tcp/1"
        await within(30, known.until_role_changes(world, 4001))
    assert other in known.through


async def test_a_relay_that_appears_later_is_used(world: World) -> None:
    world.set_answer(0, Reached.NO)
    known = Reachability()
    assert await within(30, known.until_role_changes(world, 4001)) == ""
    world.set_answer(1, Reached.NO, relays=True)
    assert await within(10, known.until_role_changes(world, 4001))
    assert known.through == (relay(1),)


async def test_a_dead_relay_is_replaced_within_half_a_minute(world: World) -> None:
    world.own = (PLACE,)
    world.set_answer(0, Reached.NO, relays=True)
    world.set_answer(1, Reached.NO, relays=True)
    known = Reachability((relay(0),))
    assert await within(400, known.until_role_changes(world, 4001)) == "", "no change is needed"
    world.gone.add(PARTNERS[0])
    world.own = ()
    assert await within(20, known.until_role_changes(world, 4001))
    assert known.through == (relay(1),)


async def test_without_another_relay_it_retries_the_old_one(world: World) -> None:
    world.gone.add(PARTNERS[0])
    known = Reachability((relay(0),))
    assert await within(60, known.until_role_changes(world, 4001)) == ""
    world.gone.clear()
    assert await within(20, known.until_role_changes(world, 4001)), "p2pd requests a new reservation when it restarts"
    assert known.through == (relay(0),)


async def test_full_relays_cause_restarts_with_back_off(world: World) -> None:
    known, began_s, num_starts = Reachability((relay(0),)), asyncio.get_running_loop().time(), 0
    while asyncio.get_running_loop().time() < began_s + 3600.0:
        num_starts += bool(await within(3600.0, known.until_role_changes(world, 4001)))
    assert 10 < num_starts < 20
    world.own = (PLACE,)
    assert await within(60, known.until_role_changes(world, 4001)) == "", "the relay gave a reservation"
    world.own = ()
    assert await within(10, known.until_role_changes(world, 4001)), "the timeout should start again"


async def test_a_peer_that_becomes_reachable_drops_its_relays(world: World) -> None:
    world.own = (PLACE,)
    world.set_answer(1, Reached.YES)
    known = Reachability((relay(0),))
    assert "no relay" in await within(20, known.until_role_changes(world, 4001))
    assert known.through == ()
