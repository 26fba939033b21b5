"""Partitioned swarms that merge again: whole nodes in virtual time, with a trainer that never meets.

By default there is no directory, so peers are found through gossip alone.

    python -m tests.swarm.healing --peers 30 --cut 300 --seeds 20 [--directory]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gossamer.peer.link import messages
from gossamer.peer.link.socket import NodeEnd
from gossamer.peer.machine.events import Event
from gossamer.peer.machine.home import Home
from gossamer.peer.meeting.driver import OwnSide
from gossamer.peer.node.peer import HeldRun, NodePeer, PeerNetwork
from gossamer.peer.simulator.resident import stay_in_directory
from gossamer.peer.simulator.stand_in import PLAN
from gossamer.peer.simulator.swarm import Spread
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.directory import DhtDirectory
from gossamer.protocol.libp2p.kademlia import RecordProtocol
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.calls import MemoryP2P
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.terms import ModelPlan
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.swarm.world import EmptyDirectory

RUN = SignedManifest.sign(Manifest.checked({"run": {"access": "open"}}), Identity(b"h" * 32))


class IdleTrainer(NodeEnd):
    """The link to a trainer that has begun, and never has a fragment due."""

    def __init__(self) -> None:
        super().__init__(Path())

    async def connect(self) -> ModelPlan:
        return PLAN

    async def run(self, on_report: Callable[[messages.TrainerReport], None]) -> None:
        on_report(messages.Progress(0, RunPhase.TRAIN, True))
        await asyncio.Future()


def ignored(event: Event) -> None:
    """Nobody listens."""


class Resident:
    """A peer that is there and keeps up with the others. `bootstraps` are what its invite names; `saved` is its book of an earlier life.

    With a `directory` it is in the real one; its address is in a network of its own then.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        bootstraps: Sequence[str] = (),
        *,
        address: str = "",
        saved: Path | None = None,
        now_s: Callable[[], float] | None = None,
        directory: bool = False,
    ) -> None:
        self.identity = Identity(number.to_bytes(4, "little") * 8)
        self.peer_id = self.identity.peer_id
        self._network, self._bootstraps, self._is_listed = network, tuple(bootstraps), directory
        self._home = Home(saved.parent if saved else Path("no home"))
        own = f"/ip4/{101 + number % 99}.{number // 99 % 250}.1.9/tcp/4001" if directory else f"/ip4/192.0.2.1/tcp/{number % 60000 + 1}"
        self._address = address or own
        self._now_s = now_s or network.now_s
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = asyncio.Event()

    def start(self) -> Resident:
        """Bring it up."""
        network, rng, unused = self._network, random.Random(f"{self.peer_id}/{len(self._tasks)}"), cast(Any, None)
        network.places[self.peer_id] = self._address
        run = HeldRun(RUN.run_id, RUN, None, self._bootstraps)
        own = OwnSide(IdleTrainer(), unused, unused)
        self.peer = peer = NodePeer(self._home, run, self.identity, own, self._now_s, rng, ignored)
        life = network.start_peer(self.peer_id, peer.answer, is_banned=peer.is_banned, has_met=peer.has_met)
        p2p: Any = MemoryP2P(network, life)
        listed = (
            DhtDirectory(RecordProtocol(p2p, peer.record_store, p2p, lambda: peer.bare_record((self._address,))))
            if self._is_listed
            else None
        )
        seams = PeerNetwork(life, listed or EmptyDirectory(), lambda: (self._address,), self._connected)
        self._tasks = [asyncio.create_task(self._run(seams, listed, p2p))]
        return self

    async def _run(self, network: PeerNetwork, directory: DhtDirectory | None, p2p: MemoryP2P) -> None:
        async with asyncio.TaskGroup() as tasks:
            if directory is not None:
                await directory.open()
                tasks.create_task(stay_in_directory(directory, p2p, self.peer.record_store, self._bootstraps))
            await self.peer.run(network)
            self._is_over.set()

    async def _connected(self) -> Collection[PeerId]:
        return self._network.connected(self.peer_id) if self._is_listed else ()

    async def until_over(self) -> None:
        """Wait until its node has ended, after `peer.stop`."""
        await self._is_over.wait()

    @property
    def book(self) -> AddressBook:
        return self.peer.book

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
    def bootstrap(self) -> str:
        """An address for others' invites."""
        return f"{self._address}/p2p/{self.peer_id}"

    def members_in_force(self) -> set[PeerId]:
        """Return of whom it holds a record that is in force."""
        return self.peer.members_in_force()


async def until_all_see_all(residents: Sequence[Resident], within_s: float) -> float:
    """Return how long it takes until each sees every other. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    began_s, everybody = loop.time(), {resident.peer_id for resident in residents}
    async with asyncio.timeout(within_s):
        while True:
            if all(resident.members_in_force() >= everybody - {resident.peer_id} for resident in residents):
                return loop.time() - began_s
            await asyncio.sleep(0.5)


def play(story: Callable[[MemoryNetwork], Awaitable[list[Resident]]], seed: int = 0, *, jitter_s: float = 0.0) -> None:
    """Let a story happen in virtual time; it returns who is up at its end."""

    async def main() -> None:
        network = MemoryNetwork(seed, Link(latency_s=0.05, jitter_s=jitter_s, silence_s=10.0))
        for resident in await story(network):
            resident.stop()
        await network.close()

    virtual_time.run(main())


@dataclass(frozen=True)
class Healed:
    """How it went with one seed."""

    together_s: float  # from the first start, all through one bootstrap node, until each saw every other
    healed_s: float  # from the end of the cut until each saw every other again
    bytes_per_s: float  # what a peer sent and received over all this time


def cut_and_heal(num_peers: int, cut_s: float, seed: int, *, directory: bool = False) -> Healed:
    """Let a swarm connect through one bootstrap node, cut it in two halves, and mend the cut."""

    async def story() -> Healed:
        network = MemoryNetwork(seed, Link(latency_s=0.05, jitter_s=0.05, silence_s=10.0))
        first = Resident(network, 1000 * seed + 1, directory=directory).start()
        numbers = range(1000 * seed + 2, 1000 * seed + 1 + num_peers)
        residents = [first, *(Resident(network, number, [first.bootstrap], directory=directory).start() for number in numbers)]
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
        spread = Spread.of(figures)
        assert spread is not None
        summary = f"{name:18} median {spread.median:8.1f}   p95 {spread.p95:8.1f}   worst {spread.worst:8.1f}"
        sys.stdout.write(f"{summary}   ({len(figures)} seeds)\n")


if __name__ == "__main__":
    main()
