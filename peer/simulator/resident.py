"""One peer of a simulated swarm: a whole `NodePeer` over the network in memory, with a stand-in for its trainer.

What libp2p does below a node is done here: a peer behind a router has places at relays, and looks for others when it loses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.machine.events import Event, MeetingDone
from gossamer.peer.machine.home import Home
from gossamer.peer.meeting.driver import OwnSide
from gossamer.peer.meeting.journal import Journal
from gossamer.peer.node.peer import HeldRun, NodePeer, PeerNetwork
from gossamer.peer.simulator.stand_in import StandInTrainer
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.addresses import by_peer, read_address, with_peer
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.directory import DhtDirectory
from gossamer.protocol.libp2p.kademlia import RecordProtocol
from gossamer.protocol.libp2p.record_store import RecordStore
from gossamer.protocol.memory.calls import MemoryP2P
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import loop_s, spawn

PULSE_S = 5.0  # as protocol/libp2p/node.py
NUM_RELAYS = 2
NUM_ACQUAINTANCES = 8


@dataclass(frozen=True)
class Run:
    """What all peers of the swarm agree on, and the invite by which they come."""

    host: Identity
    signed: SignedManifest
    invite: Invite

    @classmethod
    def of(cls, host: Identity, manifest: Manifest, bootstraps: tuple[str, ...], not_after_s: int) -> Run:
        """Make it known by these bootstraps."""
        signed = SignedManifest.sign(manifest, host)
        return cls(host, signed, Invite.issue(host, signed.run_id, bootstraps, None, not_after_s))


@dataclass
class Counts:
    """What has come of one peer so far, over all its lives."""

    meetings: Counter[str] = field(default_factory=Counter)  # by outcome
    meeting_bytes: int = 0
    line_bytes: int = 0  # of lives that are over
    num_lives: int = 0
    bugs: list[str] = field(default_factory=list)


class Resident:
    """Peer `number` of a run; number 0 is the host. What is on its disk outlives it."""

    def __init__(self, network: MemoryNetwork, run: Run, number: int, folder: Path, link: Link, ahead_s: float, place: str) -> None:
        self.identity = run.host if number == 0 else identity_of(number)
        self.peer_id = self.identity.peer_id
        self.counts = Counts()
        self.trainers: list[StandInTrainer] = []  # of each of its lives
        self.relays: tuple[PeerId, ...] = ()
        self._network, self._run, self._link, self._place = network, run, link, place
        self._home = Home(folder)
        self._ahead_s = ahead_s
        self._tasks: set[asyncio.Task[None]] = set()
        network.places[self.peer_id] = place

    @property
    def book(self) -> AddressBook:
        """Its address book in this life."""
        return self._peer.book

    @property
    def is_up(self) -> bool:
        """Whether it lives."""
        return self._network.is_up(self.peer_id)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach it: at its place, or through its relays."""
        if self.peer_id not in self._network.hidden:
            return (with_peer(self._place, self.peer_id),)
        return tuple(f"{with_peer(self._network.places[relay], relay)}/p2p-circuit/p2p/{self.peer_id}" for relay in self.relays)

    @property
    def num_bytes(self) -> int:
        """Return what it has sent and received."""
        line = self._network.peers[self.peer_id].line
        return self.counts.line_bytes + line.num_sent + line.num_received

    def members_in_force(self) -> set[PeerId]:
        """Return of whom it holds a record that is in force."""
        return self._peer.members_in_force()

    def start(self) -> None:
        """Start it from what is on its disk. A newcomer gets the manifest from a peer; the host, and a restarted peer, hold it."""
        run, network, is_host = self._run, self._network, self.identity is self._run.host
        self.counts.num_lives += 1
        rng = random.Random(f"{self.peer_id}/{self.counts.num_lives}")
        payloads, journal = PayloadFolder(self._home.path / "payloads"), Journal(self._home.journal)
        trainer = StandInTrainer(payloads, rng, joins=not is_host)
        self.trainers.append(trainer)
        credential = None if is_host else run.invite.credential_for(self.peer_id)
        signed = run.signed if is_host or self.counts.num_lives > 1 else None
        held = HeldRun(run.signed.run_id, signed, credential, run.invite.bootstraps, is_founder=is_host)
        own = OwnSide(trainer, payloads, journal)
        self._peer = peer = NodePeer(self._home, held, self.identity, own, lambda: network.now_s() + self._ahead_s, rng, self._on_event)
        if self.peer_id in network.hidden:
            self._move_to(rng.sample(self._open_peers(), min(NUM_RELAYS, len(self._open_peers()))))
        life = network.start_peer(self.peer_id, self._answer, self._link, is_banned=peer.is_banned, has_met=peer.has_met)
        p2p: Any = MemoryP2P(network, life)
        directory = DhtDirectory(RecordProtocol(p2p, peer.record_store, p2p, lambda: peer.bare_record(self.addresses)))
        living = self._live(peer, PeerNetwork(life, directory, lambda: self.addresses, p2p.connected), directory, p2p)
        spawn(living, self._tasks, f"{self.peer_id.short()} lives").add_done_callback(self._on_task_end)

    def stop(self) -> None:
        """Kill it. Its address book stays on its disk."""
        if not self.is_up:
            return
        self._home.peers.write_bytes(self.book.to_bytes(loop_s()))
        line = self._network.peers[self.peer_id].line
        self.counts.line_bytes = self.num_bytes
        line.num_sent = line.num_received = 0
        self._network.kill(self.peer_id)
        for task in self._tasks:
            task.cancel()

    async def _live(self, peer: NodePeer, network: PeerNetwork, directory: DhtDirectory, p2p: MemoryP2P) -> None:
        await directory.open()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(peer.run(network))
            tasks.create_task(stay_in_directory(directory, p2p, peer.record_store, self._run.invite.bootstraps))
            tasks.create_task(self._keep_relays())

    async def _keep_relays(self) -> None:
        """Move to other relays when one is lost, as libp2p does for a peer that cannot be called."""
        rng = random.Random(str(self.peer_id))
        while True:
            await asyncio.sleep(PULSE_S)
            if self.peer_id in self._network.hidden and not all(self._holds(relay) for relay in self.relays):
                found = [peer for peer in self._open_peers() if self._holds(peer)]
                self._move_to(rng.sample(found, min(NUM_RELAYS, len(found))))

    def _open_peers(self) -> list[PeerId]:
        """Return who may relay: members that can be called, as far as this peer knows."""
        bootstraps = [peer for multiaddr in self._run.invite.bootstraps if (peer := read_address(multiaddr)) is not None]
        known = [entry.peer_id for entry in self.book.known(loop_s())]
        return sorted({*bootstraps, *known} - self._network.hidden.keys() - {self.peer_id})

    def _holds(self, relay: PeerId) -> bool:
        return self._network.is_up(relay) and not self._network.is_cut(self.peer_id, relay)

    def _move_to(self, relays: list[PeerId]) -> None:
        self.relays = self._network.hidden[self.peer_id] = tuple(relays)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, MeetingDone):
            self.counts.meetings[event.outcome] += 1
            self.counts.meeting_bytes += event.bytes_sent + event.bytes_received

    async def _answer(self, purpose: Purpose, stream: Stream) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._peer.answer(purpose, stream)
        finally:
            self._tasks.discard(task)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (bug := task.exception()) is not None:
            self.counts.bugs.append(repr(bug))


async def stay_in_directory(directory: DhtDirectory, p2p: MemoryP2P, record_store: RecordStore, bootstraps: Sequence[str]) -> None:
    """Keep a peer's part of the directory connected until cancelled, as the supervision of libp2p does."""

    async def dial(peer: PeerId, addresses: tuple[str, ...]) -> None:
        with contextlib.suppress(GossamerError):
            await p2p.connect(peer, addresses)
            await directory.join([peer])

    while True:
        if not directory.num_neighbours:
            records = record_store.rng.sample(record_store.records(), min(NUM_ACQUAINTANCES, len(record_store.records())))
            known = [*bootstraps, *(with_peer(address, record.peer_id) for record in records for address in record.addresses)]
            await asyncio.gather(*(dial(peer, addresses) for peer, addresses in by_peer(known).items()))
        with contextlib.suppress(GossamerError):
            await directory.maintain()
        await asyncio.sleep(PULSE_S)


def identity_of(number: int) -> Identity:
    """Return the key of a peer by its number."""
    return Identity(number.to_bytes(4, "little") * 8)
