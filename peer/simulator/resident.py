"""One peer of a simulated swarm: the real node, record directory, book, hearsay, upkeep and way in, over the network in memory.

What libp2p does below them is the network's here: who stands behind a router has places at relays, and looks for others when it loses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.machine.events import Event, MeetingDone
from gossamer.peer.meeting.driver import OwnSide
from gossamer.peer.meeting.journal import Journal
from gossamer.peer.node.arrival import find_run
from gossamer.peer.node.donor import FetchServer
from gossamer.peer.node.door import Door
from gossamer.peer.node.fetching import FetchClient
from gossamer.peer.node.mirror import Mirror
from gossamer.peer.node.node import Node
from gossamer.peer.node.upkeep import Upkeep
from gossamer.peer.simulator.stand_in import PLAN, StandInTrainer
from gossamer.peer.swarm.address_book import AddressBook, loop_s
from gossamer.peer.swarm.hearsay import Hearsay
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.swarm.presence import Presence
from gossamer.peer.swarm.standing import Standing
from gossamer.peer.swarm.swarm_time import SwarmTime
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

PULSE_S = 5.0  # as protocol/libp2p/node.py
NUM_RELAYS = 2
NUM_ACQUAINTANCES = 8


@dataclass(frozen=True)
class Run:
    """What all peers of the swarm agree on, and the invite by which they come."""

    host: Identity
    signed: SignedManifest
    manifest: Manifest
    invite: Invite

    @classmethod
    def of(cls, host: Identity, manifest: Manifest, doors: tuple[str, ...], not_after_s: int) -> Run:
        """Make it known by these doors."""
        signed = SignedManifest.sign(manifest, host)
        return cls(host, signed, manifest, Invite.issue(host, signed.run_id, doors, None, not_after_s))


@dataclass
class Counts:
    """What has come of one peer so far, over all its lives."""

    meetings: dict[str, int] = field(default_factory=dict)  # by outcome
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
        self.applied: list[StandInTrainer] = []
        self.relays: tuple[PeerId, ...] = ()
        self._network, self._run, self._folder, self._link, self._place = network, run, folder, link, place
        self._ahead_s = ahead_s
        self._tasks: set[asyncio.Task[None]] = set()
        network.places[self.peer_id] = place

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

    def sees(self) -> set[PeerId]:
        """Return of whom it holds a record that is in force."""
        known = self.book.announced(loop_s())
        return {entry.peer_id for entry in known if entry.record is not None and self.hearsay.is_in_force(entry.record)}

    # ---- life ----

    def start(self) -> None:
        """Bring it up, with what is on its disk."""
        run, network, manifest = self._run, self._network, self._run.manifest
        self.counts.num_lives += 1
        rng = random.Random(f"{self.peer_id}/{self.counts.num_lives}")
        self.book, standing = AddressBook(self.peer_id), Standing()
        self.book.load(self._folder / "peers.json", loop_s())
        credential = None if self.identity is run.host else run.invite.credential_for(self.peer_id)
        self._membership = membership = Membership.of(self.identity, manifest, credential, PLAN)
        terms = membership.terms
        self.hearsay = hearsay = Hearsay(terms, self.book, SwarmTime(self._local_s), rng)
        self._door = Door(self.book, "still joining")
        if self.peer_id in network.hidden:
            self._move_to(rng.sample(self._open_peers(), min(NUM_RELAYS, len(self._open_peers()))))
        life = network.transport(self.peer_id, self._answer, self._link, is_banned=self._door.is_banned)
        p2p: Any = MemoryP2P(network, life)
        shelf = RecordStore(run.signed.run_id, self._door.is_member, hearsay.time.now_s, rng)
        rpc = RecordProtocol(p2p, shelf, p2p, lambda: membership.bare_record(self.addresses, hearsay.time.now_s()))
        self.directory = DhtDirectory(rpc)
        client = FetchClient(self.identity, terms.run_id, credential, life)
        presence = Presence(membership, self.directory, lambda: self.addresses, hearsay, standing, self._on_event, 0)
        payloads = PayloadFolder(self._folder / "payloads")
        self.trainer = StandInTrainer(payloads, rng, joins=self.identity is not run.host)
        self.applied.append(self.trainer)
        journal = Journal(self._folder / "journal")
        node = Node(
            membership, standing, presence, hearsay, life, OwnSide(self.trainer, payloads, journal), self._folder / "downloads", rng,
            self._on_event, is_founder=self.identity is run.host, has_start=True, wait_for_peers=0,
        )  # fmt: skip
        mirror, signed = Mirror(self._local_s), run.signed.to_bytes()
        self._server = FetchServer(self.identity, terms, signed, hearsay.time.now_s, mirror, hearsay, node.donor)
        upkeep = Upkeep(client, hearsay, run.invite.bootstraps, self._connected, rng)
        self._run_task(self._live(client, node, presence, upkeep, p2p, shelf))

    def stop(self) -> None:
        """Kill it. Its book stays on its disk."""
        if not self.is_up:
            return
        (self._folder / "peers.json").write_bytes(self.book.to_bytes(loop_s()))
        line = self._network.peers[self.peer_id].line
        self.counts.line_bytes += line.num_sent + line.num_received
        line.num_sent = line.num_received = 0
        self._network.kill(self.peer_id)
        for task in self._tasks:
            task.cancel()

    async def _live(self, client: FetchClient, node: Node, presence: Presence, upkeep: Upkeep, p2p: MemoryP2P, shelf: RecordStore) -> None:
        await self.directory.open()
        if self.identity is not self._run.host and self.counts.num_lives == 1:
            ways_in = (*self._run.invite.bootstraps, *self.book.ways_in(loop_s()))
            _, named = await find_run(client, ways_in, self.hearsay.time, lambda reason: None)
            self.hearsay.take_all(named)
        self._door.open(self._server, node.meetings)
        async with asyncio.TaskGroup() as tasks:
            for work in (presence.run(), upkeep.run(), node.run(), self.trainer.drive(node), self._pulse(p2p, shelf)):
                tasks.create_task(work)

    async def _pulse(self, p2p: MemoryP2P, shelf: RecordStore) -> None:
        """What libp2p and its supervision do for the directory: company, and places at relays."""
        rng = random.Random(str(self.peer_id))
        while True:
            if not self.directory.num_neighbours:
                records = rng.sample(shelf.records(), min(NUM_ACQUAINTANCES, len(shelf.records())))
                known = [*self._run.invite.bootstraps, *(with_peer(way, record.peer_id) for record in records for way in record.addresses)]
                await asyncio.gather(*(self._dial(p2p, peer, ways) for peer, ways in by_peer(known).items()))
            with contextlib.suppress(GossamerError):
                await self.directory.tend()
            if self.peer_id in self._network.hidden and not all(self._holds(relay) for relay in self.relays):
                found = [peer for peer in self._open_peers() if self._holds(peer)]
                self._move_to(rng.sample(found, min(NUM_RELAYS, len(found))))
            await asyncio.sleep(PULSE_S)

    async def _dial(self, p2p: MemoryP2P, peer: PeerId, ways: tuple[str, ...]) -> None:
        with contextlib.suppress(GossamerError):
            await p2p.connect(peer, ways)
            await self.directory.join([peer])

    def _open_peers(self) -> list[PeerId]:
        """Return who may relay: members that can be called, as far as this peer knows."""
        doors = [peer for door in self._run.invite.bootstraps if (peer := read_address(door)) is not None]
        known = [entry.peer_id for entry in self.book.known(loop_s())]
        return sorted({*doors, *known} - self._network.hidden.keys() - {self.peer_id})

    def _holds(self, relay: PeerId) -> bool:
        return self._network.is_up(relay) and not self._network.is_cut(self.peer_id, relay)

    def _move_to(self, relays: list[PeerId]) -> None:
        self.relays = self._network.hidden[self.peer_id] = tuple(relays)

    # ---- ends ----

    async def _connected(self) -> list[PeerId]:
        return self._network.connected(self.peer_id)

    def _local_s(self) -> float:
        return self._network.now_s() + self._ahead_s

    def _on_event(self, event: Event) -> None:
        if isinstance(event, MeetingDone):
            self.counts.meetings[event.outcome] = self.counts.meetings.get(event.outcome, 0) + 1
            self.counts.meeting_bytes += event.bytes_sent + event.bytes_received

    async def _answer(self, purpose: Purpose, stream: Stream) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._door.answer(purpose, stream)
        finally:
            self._tasks.discard(task)

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"{self.peer_id.short()} lives")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self.counts.bugs.append(repr(bug))


def identity_of(number: int) -> Identity:
    """Return the key of a peer by its number."""
    return Identity(number.to_bytes(4, "little") * 8)
