"""A look-up finds the nearest members despite malicious, hanging and dead peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gossamer.protocol.libp2p.directory import AT_ONCE, WALK_S, Walk
from gossamer.protocol.libp2p.neighbours import Held, nearest
from gossamer.protocol.memory import virtual_time
from tests.protocol.libp2p.test_record_store import record
from tests.protocol.peers import seeded

PLACE = 12345


def held(number: int) -> Held:
    made = record(seeded(number))
    return Held(made, made.to_bytes())


MEMBERS = [held(number) for number in range(2, 66)]
DEAD = [held(number) for number in range(1000, 1200)]
BY_PLACE = nearest(MEMBERS, PLACE, len(MEMBERS))


class World:
    """Each member knows a few members near its own place, so a look-up takes several steps."""

    def __init__(self) -> None:
        self.asked: list[Held] = []
        self.under_way = self.most_at_once = 0
        self.names: Callable[[Held], list[Held]] = lambda peer: BY_PLACE[max(0, BY_PLACE.index(peer) - 12) :][:8]
        self.hanging: set[Held] = set()

    async def ask(self, peer: Held) -> list[Held] | None:
        self.asked.append(peer)
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            await asyncio.sleep(3.0 if peer in self.hanging or peer in DEAD else 0.1)
            return None if peer in DEAD or peer in self.hanging else self.names(peer)
        finally:
            self.under_way -= 1


def walk(world: World, most_calls: int = 40) -> tuple[list[Held], float]:
    async def main() -> tuple[list[Held], float]:
        found = await Walk(PLACE, world.ask).run(BY_PLACE[-3:], 4, most_calls)
        assert world.under_way == 0, "every call should have ended"
        return found, asyncio.get_running_loop().time()

    return virtual_time.run(main())


def test_the_nearest_are_found_in_order() -> None:
    world = World()
    assert walk(world)[0] == BY_PLACE[:4]
    assert len(world.asked) < 30 and world.most_at_once <= AT_ONCE


def test_a_lookup_makes_at_most_the_allowed_calls() -> None:
    world = World()
    walk(world, most_calls=5)
    assert len(world.asked) == 5


def test_a_malicious_peer_costs_a_few_calls() -> None:
    world = World()
    honest = world.names
    attacker = BY_PLACE[-3]
    near = nearest(DEAD, PLACE, 16)
    world.names = lambda peer: near if peer == attacker else honest(peer)
    found, took_s = walk(world)
    assert found == BY_PLACE[:4]
    assert sum(peer in DEAD for peer in world.asked) <= 3 * AT_ONCE
    assert took_s < WALK_S


def test_a_peer_that_a_trusted_member_also_names_is_queried() -> None:
    world = World()
    honest = world.names
    attacker = BY_PLACE[-3]
    world.names = lambda peer: [*DEAD[:4], *BY_PLACE[:4]] if peer == attacker else honest(peer)
    assert walk(world)[0] == BY_PLACE[:4]


def test_a_hanging_call_does_not_delay_the_others() -> None:
    world = World()
    world.hanging = {BY_PLACE[10], BY_PLACE[1]}
    found, took_s = walk(world)
    assert found == [BY_PLACE[0], *BY_PLACE[2:5]]
    assert took_s < 4.0


def test_a_lookup_without_live_members_returns_none() -> None:
    world = World()
    world.hanging = set(MEMBERS)
    found, took_s = walk(world)
    assert found == [] and took_s <= WALK_S
