"""Whole swarms in one process and in virtual time: the real node and the real replica of every peer, with only network and process faked.

A seed decides everything: who is asked, what is delayed, which bytes are drawn as nonces. Peers can be killed (whole, or only their node or
trainer), restarted from what is on their disk, partitioned, or made to misbehave.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.peer.link import messages
from gossamer.peer.link.messages import Writer
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.machine.events import Event, MeetingDone, PartnerShunned, ProcessReported, StateTransferred
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.meeting.driver import OwnSide
from gossamer.peer.meeting.journal import Journal
from gossamer.peer.node.node import Node
from gossamer.peer.node.peer import FAREWELL_S, HeldRun, Member, NodePeer, PeerNetwork
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.presence import Presence
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.conversation import Link as Wire
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.terms import ModelPlan, RunTerms
from gossamer.protocol.run.invite import Credential
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from gossamer.protocol.streams.transport import Purpose, Stream, Transport
from tests.peer.small import fingerprint
from tests.protocol.scripted import ScriptedNetwork
from tests.swarm.paced import PacedTrainer
from tests.swarm.tiny import CountedReplica, tiny_manifest, tiny_replica, tiny_terms
from tests.swarm.trainer import Checkpoint, Link, Trainer

NUM_TURNS = 8
ADDRESSES = ("/ip4/192.0.2.1/tcp/4001",)


@dataclass(frozen=True)
class Habits:
    """What is special about one peer."""

    step_s: float = 0.25
    optimizer_s: float | None = None  # that a step lasts after its gradient's `step_s`; None: it takes no time, and `step_s` lies between
    text: int = 0  # on which of the texts it trains, and by which it judges
    waits_for_start: bool = False  # waits to be told, as joiners do
    is_founder: bool = True
    has_start: bool = True
    wait_for_peers: int = 0
    credential: Credential | None = None
    bootstraps: tuple[str, ...] = ()  # by which it finds the run; none: it holds the manifest
    is_blind: bool = False  # its directory knows nobody
    wire: Wire | None = None  # instead of the swarm's


class EmptyDirectory:
    """A directory in which there is nobody else."""

    async def announce(self, record: MemberRecord) -> None:
        """Tell nobody."""

    async def members(self) -> list[MemberRecord]:
        return []


class HeardLink(Link):
    """Remembers what the node said."""

    def __init__(self, plan: ModelPlan) -> None:
        super().__init__(plan)
        self.reported: list[messages.Request] = []

    async def request(self, request: messages.AnsweredRequest) -> messages.Reply:
        self.reported.append(request)
        return await super().request(request)

    def notify(self, request: messages.Notification) -> None:
        self.reported.append(request)
        super().notify(request)


class Peer:
    """One peer: what is on its disk outlives it, the rest is made anew at each start."""

    def __init__(self, swarm: Swarm, number: int, habits: Habits) -> None:
        self.swarm = swarm
        self.identity = Identity(number.to_bytes(4, "little") * 8)
        self.habits = habits
        self.addresses = ADDRESSES
        self.checkpoint: Checkpoint | None = None
        self.meetings: list[MeetingDone] = []
        self.transfers: list[StateTransferred] = []
        self.shunned: list[PartnerShunned] = []
        self.reported: list[ProcessReported] = []
        self.status = Status()  # as far as the node's events tell it
        self.forward: Callable[[Event], None] = lambda event: None  # gets every event of the node
        self.local_s = swarm.network.now_s  # the machine's clock
        self.failure: BaseException | None = None
        self.is_done = False
        self.home = Home(swarm.folder / f"peer-{number}")
        self.payloads = PayloadFolder(self.home.path / "payloads")
        self.num_starts = 0  # of the trainer
        self._tasks: set[asyncio.Task[None]] = set()
        self._node_tasks: set[asyncio.Task[None]] = set()
        self.trainer = self._new_trainer()

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def book(self) -> AddressBook:
        return self.peer.book

    @property
    def lifecycle(self) -> Lifecycle:
        return self.peer.lifecycle

    @property
    def member(self) -> Member:
        assert self.peer.member is not None, "it does not know the manifest yet"
        return self.peer.member

    @property
    def presence(self) -> Presence:
        assert self.member.presence is not None
        return self.member.presence

    @property
    def node(self) -> Node:
        assert self.peer.node is not None, "it does not know its trainer yet"
        return self.peer.node

    @property
    def hash(self) -> str:
        """Hash all that a checkpoint holds."""
        return fingerprint(self.trainer.replica)

    @property
    def fast(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.trainer.replica.parameters.values()])

    @property
    def slow(self) -> Tensor:
        return torch.cat([fragment.slow for fragment in self.trainer.replica.fragments])

    @property
    def global_step(self) -> int:
        return self.trainer.replica.global_step

    @property
    def has_decided(self) -> bool:
        """Whether its journal holds a meeting."""
        return bool(self.home.journal.read_bytes())

    @property
    def num_completed(self) -> int:
        return self.outcomes()["completed"]

    def outcomes(self) -> Counter[str]:
        return Counter(done.outcome for done in self.meetings)

    def partners(self) -> Counter[str]:
        return Counter(done.partner for done in self.meetings if done.outcome == "completed")

    def join_with(self, credential: Credential, place: int = 0) -> Peer:
        """Have it show this from its next start on, and live in a network of its own if `place` names one."""
        self.habits = replace(self.habits, credential=credential)
        self.addresses = (f"/ip4/20.{place}.0.1/tcp/4001",) if place else ADDRESSES
        if place:
            self.swarm.network.places[self.peer_id] = self.addresses[0]
        return self

    # ---- life ----

    def start(self) -> Peer:
        """Start trainer and node from what is on the disk."""
        self.start_trainer()
        self.start_node()
        return self

    def start_trainer(self) -> None:
        if self.num_starts:
            self.trainer = self._new_trainer()
        self.num_starts += 1
        self._run(self.trainer.run(), self._tasks)

    def start_node(self) -> None:
        swarm, habits, network = self.swarm, self.habits, self.swarm.network
        self._over = asyncio.Event()
        self.payloads.clear(Writer.NODE)
        self.journal = Journal(self.home.journal)
        self.link = HeardLink(swarm.plan)
        self.own = OwnSide(self.link, self.payloads, self.journal)
        signed = None if habits.bootstraps else swarm.signed
        run = HeldRun(swarm.terms.run_id, signed, habits.credential, habits.bootstraps, habits.is_founder)
        rng = random.Random(f"{swarm.seed}/{self.peer_id}/{self.num_starts}")
        self.peer = NodePeer(
            self.home,
            run,
            self.identity,
            self.own,
            self.local_s,
            rng,
            self.on_event,
            wait_for_peers=habits.wait_for_peers,
            has_weights=habits.has_start,
        )
        self.transport: Transport = network.start_peer(
            self.peer_id, self._answer, habits.wire, None, self.peer.is_banned, self.peer.has_met
        )
        self.trainer.connect(self.link)
        directory = EmptyDirectory() if habits.is_blind else network.peers[self.peer_id]
        self._run(
            self._serve(PeerNetwork(swarm.wrap(self, self.transport), directory, lambda: self.addresses, self._connected)), self._node_tasks
        )

    def on_event(self, event: Event) -> None:
        self.status = apply(self.status, event)
        self.forward(event)
        match event:
            case StateTransferred():
                self.transfers.append(event)
            case MeetingDone():
                self.meetings.append(event)
            case PartnerShunned():
                self.shunned.append(event)
            case ProcessReported():
                self.reported.append(event)

    def kill(self) -> None:
        """kill -9 of the whole peer; its replica stays to be looked at."""
        self.swarm.network.kill(self.peer_id)

    def kill_trainer(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        self.link.cut()

    def restart_trainer(self) -> None:
        """Start the trainer from its checkpoint; the node finds it again."""
        self.start_trainer()
        self.link.is_up = True
        self.trainer.connect(self.link)

    def died(self) -> None:
        """The network has taken this peer down: end what runs, at once."""
        spares_trainer = self.swarm.kills_nodes_only
        for task in [*self._node_tasks, *([] if spares_trainer else self._tasks)]:
            task.cancel()
        if spares_trainer:
            self.trainer.disconnect()
        self.link.is_up = False
        self.journal.close()

    def save(self) -> None:
        self.checkpoint = self.trainer.save()

    async def leave(self, grace_s: float = 3.0) -> None:
        await self.node.meetings.leave(grace_s)
        await self.presence.leave(FAREWELL_S)
        self.kill()

    def _new_trainer(self) -> Trainer:
        self.payloads.clear(Writer.TRAINER)
        waits_for_start = self.checkpoint is None and self.habits.waits_for_start
        if self.habits.optimizer_s is None:
            return Trainer(self._new_replica, self.habits.step_s, waits_for_start)
        paced = PacedTrainer(self._new_replica, self.habits.step_s, waits_for_start)
        paced.optimizer_s = self.habits.optimizer_s
        return paced

    def _new_replica(self, emit: Callable[[Event], None]) -> CountedReplica:
        replica = tiny_replica(self.swarm.manifest, self.payloads, self.peer_id.raw, emit, self.habits.text)
        if self.checkpoint is not None:
            replica.restore(self.checkpoint.tensors, self.checkpoint.state)
        return replica

    async def _connected(self) -> list[PeerId]:
        return self.swarm.network.connected(self.peer_id)

    async def until_over(self) -> None:
        """Wait until the node has ended in order, or failed."""
        await self._over.wait()

    async def _serve(self, network: PeerNetwork) -> None:
        try:
            await self.peer.run(network)
            self.is_done = True
        except Exception as error:
            self.failure = error
        self._over.set()

    async def _answer(self, purpose: Purpose, stream: Stream) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._node_tasks.add(task)
        try:
            await self.peer.answer(purpose, stream)
        finally:
            self._node_tasks.discard(task)

    def _run(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


@dataclass
class Swarm:
    """Peers on one network. `wrap` may put a test's own transport before a peer's."""

    folder: Path
    seed: int = 0
    manifest: Manifest = field(default_factory=tiny_manifest)
    wire: Wire = field(default_factory=lambda: Wire(latency_s=0.02, jitter_s=0.01, bytes_per_s=1e6))
    wrap: Callable[[Peer, Transport], Transport] = lambda peer, transport: transport
    kills_nodes_only: bool = False
    peers: list[Peer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.network = ScriptedNetwork(self.seed, self.wire)
        self.network.on_death(self._on_death)
        self.terms: RunTerms = tiny_terms(self.manifest)
        self.signed = SignedManifest.sign(self.manifest, Identity(b"h" * 32))

    @property
    def plan(self) -> ModelPlan:
        return ModelPlan(self.terms.codec_id, self.terms.fragments, self.terms.state_bytes)

    def add(self, habits: Habits | None = None, **special: Any) -> Peer:
        """Make a peer that is not started yet."""
        peer = Peer(self, len(self.peers) + 1, replace(habits or Habits(), **special))
        self.peers.append(peer)
        return peer

    def start(self, num_peers: int, **special: Any) -> list[Peer]:
        return [self.add(**special).start() for _ in range(num_peers)]

    def spread(self, peers: list[Peer] | None = None) -> float:
        """Return how far apart the slow weights are: their standard deviation over the peers, as a length."""
        slow = torch.stack([peer.slow for peer in peers or self.peers])
        return float((slow - slow.mean(0)).square().mean(0).sum().sqrt())

    async def until(self, condition: Callable[[], object], within_s: float = 120.0) -> None:
        """Let virtual time pass until something holds; fail when it does not in time."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        await started()
        while not condition():
            self.check()
            assert loop.time() < until_s, "it did not come to pass"
            await asyncio.sleep(0.05)

    async def __aenter__(self) -> Swarm:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.check()
            await self.close()

    def check(self) -> None:
        for peer in self.peers:
            if peer.failure is not None:
                raise peer.failure

    async def close(self) -> None:
        for peer in self.peers:
            peer.kill()
            peer.kill_trainer()
        await self.network.close()
        await asyncio.sleep(0)
        await asyncio.sleep(5.0)  # what was cancelled cleans up
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks left behind: {left}"

    def _on_death(self, peer_id: PeerId) -> None:
        for peer in self.peers:
            if peer.peer_id == peer_id:
                peer.died()


async def started() -> None:
    """Let peers that were just started make their nodes, which takes some turns of the loop and no time."""
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)


async def frozen_source(swarm: Swarm, global_step: int = 5) -> Peer:
    """Start a peer, and stop its trainer once it has made so many steps: its weights change no more."""
    (source,) = swarm.start(1)
    await swarm.until(lambda: source.global_step >= global_step)
    source.trainer.frozen = True
    return source


def play(swarm: Swarm, story: Callable[[Swarm], Awaitable[None]]) -> None:
    """Let a story happen in virtual time, and see that it leaves nothing behind."""

    async def inside() -> None:
        async with swarm:
            await story(swarm)

    torch.set_num_threads(1)
    virtual_time.run(inside())
