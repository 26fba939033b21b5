"""The directory of a whole swarm under virtual time: look-ups succeed despite malicious peers, at a cost independent of the size."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gossamer.protocol.errors import TransportError
from gossamer.protocol.libp2p.directory import LEAVE_S, NUM_HOLDERS
from gossamer.protocol.libp2p.kademlia import NAMED, NAMED_TOO
from gossamer.protocol.libp2p.neighbours import place_of
from gossamer.protocol.limits import RECORD_LIFETIME_S
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.messages.records import MemberRecord
from tests.protocol.memory.members import Seat, now_s

LINK = Link(latency_s=0.025, jitter_s=0.05)
LOOK_BYTES = 40_000  # of all calls of one look-up, in both directions
KNOWN_LOOK_BYTES = 8_000  # the same for a look-up that finds no new member


async def announce(seat: Seat, number: int, **words: Any) -> MemberRecord:
    """Announce a member with a long-lived record, changed by these fields; return the record."""
    bare = seat.membership.bare_record(seat.addresses, now_s() + number)
    made = replace(bare, **{"expires_s": int(now_s()) + RECORD_LIFETIME_S, "signature": b""} | words).signed(seat.identity)
    await seat.directory.announce(made)
    return made


async def swarm(network: MemoryNetwork, num: int, reachable: float = 1.0, num_malicious: int = 0) -> list[Seat]:
    """Start members one after the other; each announces itself twice."""
    rng = random.Random(1)
    seats = [Seat(network, number, is_open=number == 0 or rng.random() < reachable) for number in range(num)]
    for seat in seats:
        await seat.open()
        await announce(seat, 1)
    for attacker in [seat for seat in seats[1:] if seat.is_open][:num_malicious]:
        attacker.misbehave()
    await asyncio.sleep(60)
    for seat in seats:
        await announce(seat, 2)
    return seats


def held_by_nearest(seats: list[Seat], num_malicious: int = 0) -> float:
    """Return the share of members whose record is stored by at least half of the nearest honest members."""
    lying = [seat for seat in seats[1:] if seat.is_open][:num_malicious]
    honest = [seat for seat in seats if seat.is_open and seat not in lying]
    good = 0
    for seat in seats:
        others = sorted((one for one in honest if one is not seat), key=lambda one: place_of(one.peer_id) ^ place_of(seat.peer_id))
        near = others[:NUM_HOLDERS]
        good += 2 * sum(seat.peer_id in one.holds for one in near) >= len(near)
    return good / len(seats)


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(1, LINK)


async def test_announced_records_are_stored_and_found_despite_malicious_peers(network: MemoryNetwork) -> None:
    seats = await swarm(network, 40, num_malicious=1)
    assert held_by_nearest(seats, num_malicious=1) >= 0.95
    found = 0
    for seat in seats[2:]:
        began_s = asyncio.get_running_loop().time()
        names = {record.peer_id for record in await seat.directory.members()}
        assert asyncio.get_running_loop().time() - began_s <= 6.0
        found += len(names & {other.peer_id for other in seats}) >= NAMED
    assert found >= 0.95 * len(seats[2:])


async def test_a_newcomer_finds_twenty_members_in_three_lookups_if_one_in_ten_is_reachable(network: MemoryNetwork) -> None:
    seats = await swarm(network, 60, reachable=0.1)
    assert held_by_nearest(seats) >= 0.95
    newcomer = Seat(network, 60, is_open=False)
    await newcomer.open()
    for _ in range(3):
        found = await newcomer.directory.members()
    assert len(found) >= 20
    assert not any(newcomer.peer_id == held.peer for seat in seats for held in seat.rpc.neighbours.all())


def test_a_lookup_costs_the_same_in_a_swarm_twice_as_large() -> None:
    async def costs(num: int) -> float:
        network = MemoryNetwork(1, LINK)
        await swarm(network, num)
        newcomers = [Seat(network, number) for number in range(num, num + 10)]
        for newcomer in newcomers:
            await newcomer.open()
            await newcomer.directory.members()
        return sum(newcomer.num_bytes for newcomer in newcomers) / len(newcomers)

    small, large = virtual_time.run(costs(25)), virtual_time.run(costs(50))
    assert large < LOOK_BYTES and large < 1.6 * small
    assert small > (NAMED + NAMED_TOO) * 300, "a reply should still contain full records"


async def test_a_lookup_among_known_members_costs_little(network: MemoryNetwork) -> None:
    one = (await swarm(network, 25))[3]
    looks = [len(await one.directory.members()) for _ in range(20)]
    before = one.num_bytes
    assert len(await one.directory.members()) == looks[-1] == 25
    assert one.num_bytes - before < KNOWN_LOOK_BYTES


async def test_a_record_is_stored_again_when_it_changes_or_after_a_minute(network: MemoryNetwork) -> None:
    one, holder = Seat(network, 0), Seat(network, 1)
    for seat in (one, holder):
        await seat.open()

    def is_held(record: MemberRecord) -> bool:
        return record in [held.record for held in holder.rpc.holdings.all()]

    brought_s = []
    for number in range(120):
        if is_held(await announce(one, number)):
            brought_s.append(now_s())
        await asyncio.sleep(5.0)
    gaps_s = [later_s - earlier_s for earlier_s, later_s in pairwise(brought_s)]
    assert min(gaps_s) >= LEAVE_S and max(gaps_s) <= LEAVE_S + 10.0, gaps_s
    for number, news in enumerate(({"finished": True}, {"addresses": ("/ip4/9.9.9.9/tcp/1",)}, {"expires_s": int(now_s()) + 9}), 120):
        assert is_held(await announce(one, number, **news))


async def test_a_peer_whose_neighbours_are_all_gone_finds_a_connected_newcomer(network: MemoryNetwork) -> None:
    host, one, other = (Seat(network, number) for number in range(3))
    for seat in (host, one, other):
        await seat.open()
        await announce(seat, 1)
    network.kill(host.peer_id)
    network.kill(other.peer_id)
    await asyncio.sleep(100)
    with suppress(TransportError):
        await announce(one, 2)
    assert one.directory.num_neighbours == 0
    back = Seat(network, 2)
    await back.directory.open()
    await back.p2p.connect(one.peer_id, one.addresses)
    await announce(back, 3)
    assert {record.peer_id for record in await one.directory.members()} >= {one.peer_id, back.peer_id}
