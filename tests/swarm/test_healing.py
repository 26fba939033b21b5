"""A swarm that heals: after cuts, deaths of all bootstrap nodes, and new addresses. Figures: `python -m tests.swarm.healing`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gossamer.peer.swarm.address_book import FORGET_S
from gossamer.protocol.limits import RECORD_LIFETIME_S
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.tasks import loop_s
from tests.swarm.healing import Resident, cut_and_heal, play, until_all_see_all

NIGHT_S = FORGET_S + RECORD_LIFETIME_S + 10.0  # by then nobody tries those who have gone, and nothing that was announced is in force


@pytest.mark.parametrize(("seed", "directory"), [(0, False), (1, False), (2, True)])
def test_two_halves_are_one_again_within_a_minute_of_a_long_cut(seed: int, directory: bool) -> None:
    healed = cut_and_heal(10, RECORD_LIFETIME_S + 30.0, seed, directory=directory)
    assert healed.healed_s <= 60.0 and healed.bytes_per_s < 10_000


def test_what_cannot_be_reached_is_not_forgotten_and_each_half_keeps_itself(tmp_path: Path) -> None:
    async def story(network: MemoryNetwork) -> list[Resident]:
        first = Resident(network, 1).start()
        residents = [first, *(Resident(network, number, [first.bootstrap]).start() for number in range(2, 7))]
        await until_all_see_all(residents, 60.0)
        here, there = residents[:3], residents[3:]
        network.partition([resident.peer_id for resident in here])
        await asyncio.sleep(RECORD_LIFETIME_S + 60.0)
        for half, other in ((here, there), (there, here)):
            for resident in half:
                assert resident.members_in_force() == {one.peer_id for one in half} - {resident.peer_id}
                assert {entry.peer_id for entry in resident.book.known(loop_s())} >= {one.peer_id for one in other}
        return residents

    play(story)


def test_a_peer_that_joins_during_a_cut_knows_all_once_it_heals() -> None:
    async def story(network: MemoryNetwork) -> list[Resident]:
        host = Resident(network, 1).start()
        far = Resident(network, 2, [host.bootstrap]).start()
        mate = Resident(network, 3, [host.bootstrap])
        newcomer = Resident(network, 4, [host.bootstrap, mate.bootstrap])
        network.partition([mate.peer_id, newcomer.peer_id])
        mate.start()  # neither has ever met the others
        newcomer.start()
        await until_all_see_all([mate, newcomer], 60.0)
        await asyncio.sleep(600.0)
        network.partition()
        await until_all_see_all([host, far, mate, newcomer], 60.0)
        return [host, far, mate, newcomer]

    play(story)


def test_a_peer_restarts_by_its_address_book_while_all_bootstraps_are_dead(tmp_path: Path) -> None:
    async def story(network: MemoryNetwork) -> list[Resident]:
        bootstraps = [Resident(network, number).start() for number in (1, 2)]
        invited = [bootstrap.bootstrap for bootstrap in bootstraps]
        members = [Resident(network, number, invited).start() for number in range(3, 8)]
        await until_all_see_all([*bootstraps, *members], 60.0)
        for bootstrap in bootstraps:
            bootstrap.stop()
        saved = tmp_path / "peers.json"
        saved.write_bytes(members[0].book.to_bytes(loop_s()))
        members[0].stop()
        await asyncio.sleep(NIGHT_S)
        again = Resident(network, 3, invited, saved=saved).start()
        await until_all_see_all([again, *members[1:]], 60.0)
        return [again, *members[1:]]

    play(story)


def test_everybody_moves_overnight_and_one_seed_that_stayed_is_enough(tmp_path: Path) -> None:
    async def story(network: MemoryNetwork) -> list[Resident]:
        seed = Resident(network, 1).start()
        before = [Resident(network, number, [seed.bootstrap]).start() for number in range(2, 7)]
        await until_all_see_all([seed, *before], 60.0)
        for resident in before:
            home = tmp_path / str(resident.peer_id)
            home.mkdir()
            (home / "peers.json").write_bytes(resident.book.to_bytes(loop_s()))
            resident.stop()
        await asyncio.sleep(NIGHT_S)
        after = []
        for number, resident in enumerate(before, 2):
            place, saved = f"/ip4/198.51.100.{number}/tcp/4001", tmp_path / str(resident.peer_id) / "peers.json"
            after.append(Resident(network, number, [seed.bootstrap], address=place, saved=saved).start())
            await asyncio.sleep(1.0)
        await until_all_see_all([seed, *after], 60.0)
        return [seed, *after]

    play(story)


def test_peers_with_clocks_an_hour_wrong_meet_and_are_warned() -> None:
    async def story(network: MemoryNetwork) -> list[Resident]:
        first = Resident(network, 1).start()
        right = [first, *(Resident(network, number, [first.bootstrap]).start() for number in range(2, 4))]
        fast = Resident(network, 4, [first.bootstrap], now_s=lambda: network.now_s() + 3600.0).start()
        slow = Resident(network, 5, [first.bootstrap], now_s=lambda: network.now_s() - 3600.0).start()
        await until_all_see_all([*right, fast, slow], 90.0)
        assert "3600 s ahead of" in fast.peer.time.warning and "3600 s behind" in slow.peer.time.warning
        assert not any(resident.peer.time.warning for resident in right)
        return [*right, fast, slow]

    play(story)


@pytest.mark.parametrize("latency_s", [0.05, 0.6])
def test_a_peer_that_leaves_is_gone_for_all_within_seconds(latency_s: float) -> None:
    async def main() -> None:
        network = MemoryNetwork(0, Link(latency_s=latency_s, silence_s=10.0))
        first = Resident(network, 1, directory=True).start()
        residents = [first, *(Resident(network, number, [first.bootstrap], directory=True).start() for number in range(2, 7))]
        await until_all_see_all(residents, 120.0)
        await asyncio.sleep(60.0)  # they look seldom by now
        leaver, *others = residents
        leaver.peer.stop()
        began_s = loop_s()
        await leaver.until_over()
        assert loop_s() - began_s <= 4.0, "the supervisor kills it soon after"
        leaver.stop()
        await asyncio.sleep(5.0)
        assert not [other for other in others if leaver.peer_id in other.members_in_force()]
        for other in others:
            other.stop()
        await network.close()

    virtual_time.run(main())
