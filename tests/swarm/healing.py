"""Swarms that are cut in two and grow together again: presence, hearsay, doors and upkeep of every peer are the real ones, in virtual time.

Unless there is to be one, there is no directory at all, so nobody is found but through what peers tell each other; and no trainer, so no
meeting helps.

    python -m tests.swarm.healing --peers 30 --cut 300 --seeds 20 [--directory]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.peer.machine.events import Event
from gossamer.peer.node.donor import FetchServer
from gossamer.peer.node.door import Door
from gossamer.peer.node.fetching import FetchClient
from gossamer.peer.node.mirror import Mirror
from gossamer.peer.node.upkeep import Upkeep
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.hearsay import Hearsay
from gossamer.peer.swarm.presence import Presence
from gossamer.peer.swarm.standing import Standing
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.addresses import by_peer, with_peer
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.directory import DhtDirectory
from gossamer.protocol.libp2p.kademlia import RecordProtocol
from gossamer.protocol.libp2p.record_store import RecordStore
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.calls import MemoryP2P
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.memory.network import MemoryNetwork, MemoryPeer
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.terms import check_record
from tests.peer.two_sides import TERMS, membership
from tests.swarm.world import EmptyDirectory

ACQUAINTANCES = 8
PULSE_S = 5.0  # as protocol/libp2p/node.py


def is_member(record: MemberRecord, now_s: float) -> bool:
    try:
        check_record(record, TERMS, now_s)
    except GossamerError:
        return False
    return True


def unheard(event: Event) -> None:
    """Nobody listens."""


class Resident:
    """A peer that is there and keeps up with the others. `doors` are what its invite names; `saved` is its book of an earlier life.

    With a `directory` it is in the real one; its address is in a network of its own then.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        doors: Sequence[str] = (),
        *,
        address: str = "",
        saved: Path | None = None,
        now_s: Callable[[], float] | None = None,
        directory: bool = False,
    ) -> None:
        self.identity = Identity(number.to_bytes(4, "little") * 8)
        self.peer_id = self.identity.peer_id
        self.book = AddressBook(self.peer_id)
        self._network, self._doors, self._saved, self._is_listed = network, tuple(doors), saved, directory
        own = f"/ip4/{101 + number % 99}.{number // 99 % 250}.1.9/tcp/4001" if directory else f"/ip4/192.0.2.1/tcp/{number % 60000 + 1}"
        self._address = address or own
        self._now_s = now_s or network.now_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> Resident:
        """Bring it up."""
        network, rng = self._network, random.Random(f"{self.peer_id}/{len(self._tasks)}")
        self.hearsay = hearsay = Hearsay(TERMS, self.book, SwarmTime(self._now_s), rng)
        if self._saved is not None:
            self.book.load(self._saved, asyncio.get_running_loop().time())
        network.places[self.peer_id] = self._address
        standing, door = Standing(), Door(self.book, "later")
        standing.told(0, RunPhase.TRAIN, True)
        door.open(FetchServer(self.identity, TERMS, b"manifest", hearsay.time.now_s, Mirror(self._now_s), hearsay))
        life = network.transport(self.peer_id, door.answer, is_banned=door.is_banned)
        client, member = FetchClient(self.identity, TERMS.run_id, None, life), membership(self.identity)
        listed = self._listed(life, rng) if self._is_listed else None
        directory = listed or EmptyDirectory()
        presence = Presence(member, directory, lambda: (self._address,), hearsay, standing, unheard, 0)
        upkeep = Upkeep(client, hearsay, self._doors, self._connected, rng)
        work = [self._run(presence, listed), upkeep.run()]
        self._tasks = [asyncio.create_task(one) for one in work]
        return self

    def _listed(self, life: MemoryPeer, rng: random.Random) -> DhtDirectory:
        """Return its part of the directory."""
        member, time = membership(self.identity), self.hearsay.time
        self._p2p: Any = MemoryP2P(self._network, life)
        self._shelf = RecordStore(TERMS.run_id, lambda record: is_member(record, time.now_s()), time.now_s, rng)
        rpc = RecordProtocol(self._p2p, self._shelf, self._p2p, lambda: member.bare_record((self._address,), time.now_s()))
        return DhtDirectory(rpc)

    async def _run(self, presence: Presence, directory: DhtDirectory | None) -> None:
        async with asyncio.TaskGroup() as tasks:
            if directory is not None:
                await directory.open()
                tasks.create_task(self._tend(directory))
            tasks.create_task(presence.run())

    async def _tend(self, directory: DhtDirectory) -> None:
        """Do what libp2p's supervision does for a directory, whether members are known or not."""
        while True:
            if not directory.num_neighbours:
                known = [with_peer(way, record.peer_id) for record in self._shelf.records() for way in record.addresses]
                for peer, ways in by_peer([*self._doors, *known[:ACQUAINTANCES]]).items():
                    with contextlib.suppress(GossamerError):
                        await self._p2p.connect(peer, ways)
                        await directory.join([peer])
            with contextlib.suppress(GossamerError):
                await directory.tend()
            await asyncio.sleep(PULSE_S)

    async def _connected(self) -> Collection[PeerId]:
        return self._network.connected(self.peer_id) if self._is_listed else ()

    @property
    def num_bytes(self) -> int:
        """Return what it has sent and received."""
        line = self._network.peers[self.peer_id].line
        return line.num_sent + line.num_received

    def stop(self) -> None:
        """Kill it."""
        self._network.kill(self.peer_id)
        for task in self._tasks:
            task.cancel()

    @property
    def door(self) -> str:
        """An address for others' invites."""
        return f"{self._address}/p2p/{self.peer_id}"

    def sees(self) -> set[PeerId]:
        """Return of whom it holds a record that is in force."""
        known = self.book.announced(asyncio.get_running_loop().time())
        return {entry.peer_id for entry in known if entry.record is not None and self.hearsay.is_in_force(entry.record)}


async def until_all_see_all(residents: Sequence[Resident], within_s: float) -> float:
    """Return how long it takes until each sees every other. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    began_s, everybody = loop.time(), {resident.peer_id for resident in residents}
    async with asyncio.timeout(within_s):
        while True:
            if all(resident.sees() >= everybody - {resident.peer_id} for resident in residents):
                return loop.time() - began_s
            await asyncio.sleep(0.5)


@dataclass(frozen=True)
class Healed:
    """How it went with one seed."""

    together_s: float  # from the first start, all through one door, until each saw every other
    healed_s: float  # from the end of the cut until each saw every other again
    bytes_per_s: float  # what a peer sent and received over all this time


def cut_and_heal(num_peers: int, cut_s: float, seed: int, *, directory: bool = False) -> Healed:
    """Let a swarm find together through one door, cut it in two halves, and mend the cut."""

    async def story() -> Healed:
        network = MemoryNetwork(seed, Link(latency_s=0.05, jitter_s=0.05, silence_s=10.0))
        first = Resident(network, 1000 * seed + 1, directory=directory).start()
        numbers = range(1000 * seed + 2, 1000 * seed + 1 + num_peers)
        residents = [first, *(Resident(network, number, [first.door], directory=directory).start() for number in numbers)]
        together_s = await until_all_see_all(residents, 600.0)
        await asyncio.sleep(60.0)
        half = [resident.peer_id for resident in residents[: num_peers // 2]]
        network.partition(half)
        await asyncio.sleep(cut_s)
        network.partition()
        healed_s = await until_all_see_all(residents, 600.0)
        num_bytes = sum(resident.num_bytes for resident in residents) / num_peers
        for resident in residents:
            resident.stop()
        await network.close()
        return Healed(together_s, healed_s, num_bytes / asyncio.get_running_loop().time())

    return virtual_time.run(story())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=30)
    parser.add_argument("--cut", type=float, default=300.0, help="seconds")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--directory", action="store_true", help="the real one, too")
    given = parser.parse_args()
    trials = [cut_and_heal(given.peers, given.cut, seed, directory=given.directory) for seed in range(given.seeds)]
    for name, figures in (
        ("together after s", [trial.together_s for trial in trials]),
        ("healed after s", [trial.healed_s for trial in trials]),
        ("bytes/s of a peer", [trial.bytes_per_s for trial in trials]),
    ):
        p95 = sorted(figures)[max(0, -(-95 * len(figures) // 100) - 1)]
        said = f"{name:18} median {statistics.median(figures):8.1f}   p95 {p95:8.1f}   worst {max(figures):8.1f}"
        sys.stdout.write(f"{said}   ({len(figures)} seeds)\n")


if __name__ == "__main__":
    main()
