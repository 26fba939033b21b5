"""Swarms that are cut in two and grow together again: presence, hearsay, doors and upkeep of every peer are the real ones, in virtual time.

There is no directory at all, so nobody is found but through what peers tell each other; and no trainer, so no meeting helps.

    python -m tests.swarm.healing --peers 30 --cut 300 --seeds 20
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.machine.events import Event
from peer.node.donor import FetchServer
from peer.node.door import Door
from peer.node.fetching import FetchClient
from peer.node.mirror import Mirror
from peer.node.upkeep import Upkeep
from peer.swarm.address_book import AddressBook
from peer.swarm.hearsay import Hearsay
from peer.swarm.presence import Presence
from peer.swarm.standing import Standing
from peer.swarm.swarm_time import SwarmTime
from protocol.identity import Identity, PeerId
from protocol.memory import virtual_time
from protocol.memory.conversation import Link
from protocol.memory.network import MemoryNetwork, MemoryPeer
from protocol.messages.messages import RunPhase
from protocol.streams.transport import Purpose, Stream
from tests.peer.two_sides import TERMS, membership
from tests.swarm.world import EmptyDirectory


async def nobody_connected() -> tuple[PeerId, ...]:
    return ()


def unheard(event: Event) -> None:
    """Nobody listens."""


class Counted:
    """A transport that counts the bytes of the streams that it opened."""

    def __init__(self, inner: MemoryPeer) -> None:
        self._inner = inner
        self._streams: list[Stream] = []

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        stream = await self._inner.connect(partner, addresses, purpose)
        self._streams.append(stream)
        return stream

    @property
    def num_bytes(self) -> int:
        """Bytes both ways."""
        return sum(stream.bytes_sent + stream.bytes_received for stream in self._streams)


class Resident:
    """A peer that is there and keeps up with the others. `doors` are what its invite names; `saved` is its book of an earlier life."""

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        doors: Sequence[str] = (),
        *,
        address: str = "",
        saved: Path | None = None,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self.identity = Identity(number.to_bytes(4, "little") * 8)
        self.peer_id = self.identity.peer_id
        self.book = AddressBook(self.peer_id)
        self._network, self._doors, self._address, self._saved = (
            network,
            tuple(doors),
            address or f"/ip4/192.0.2.1/tcp/{number % 60000 + 1}",
            saved,
        )
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
        self.transport = Counted(network.transport(self.peer_id, door.answer, is_banned=door.is_banned))
        client = FetchClient(self.identity, TERMS.run_id, None, self.transport)
        presence = Presence(membership(self.identity), EmptyDirectory(), lambda: (self._address,), hearsay, standing, unheard, 0)
        upkeep = Upkeep(client, hearsay, self._doors, nobody_connected, rng)
        self._tasks = [asyncio.create_task(work) for work in (presence.run(), upkeep.run())]
        return self

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


def cut_and_heal(num_peers: int, cut_s: float, seed: int) -> Healed:
    """Let a swarm find together through one door, cut it in two halves, and mend the cut."""

    async def story() -> Healed:
        network = MemoryNetwork(seed, Link(latency_s=0.05, jitter_s=0.05, silence_s=10.0))
        first = Resident(network, 1000 * seed + 1).start()
        others = [Resident(network, 1000 * seed + 2 + number, [first.door]).start() for number in range(num_peers - 1)]
        residents = [first, *others]
        together_s = await until_all_see_all(residents, 600.0)
        await asyncio.sleep(60.0)
        half = [resident.peer_id for resident in residents[: num_peers // 2]]
        network.partition(half)
        await asyncio.sleep(cut_s)
        network.partition()
        healed_s = await until_all_see_all(residents, 600.0)
        num_bytes = 2 * sum(resident.transport.num_bytes for resident in residents) / num_peers
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
    given = parser.parse_args()
    trials = [cut_and_heal(given.peers, given.cut, seed) for seed in range(given.seeds)]
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
