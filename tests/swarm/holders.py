"""A staged run in virtual time: the real node of every holder over a network in memory, and trainers that compute nothing.

A scripted trainer writes files of the right size, takes time, counts what it was asked, and makes a step with each batch of micro-batches.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gossamer.peer.link import messages
from gossamer.peer.link.messages import (
    Backward,
    Begin,
    Forward,
    Forwarded,
    HopFile,
    HopReply,
    HopRequest,
    Returned,
    Unlike,
    Writer,
    hop_file,
)
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import LinkLost
from gossamer.peer.machine.events import Event, PartnerShunned, StageMoved, Warned
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.meeting.driver import OwnSide
from gossamer.peer.meeting.journal import Journal
from gossamer.peer.model.plan import ClockBudget
from gossamer.peer.node import staging
from gossamer.peer.node.carrying import Carrying
from gossamer.peer.node.peer import HeldRun, NodePeer, PeerNetwork
from gossamer.peer.pipeline.driver import Pipeline
from gossamer.peer.supervisor.condition import Condition
from gossamer.peer.trainer.stage_loop import batches_to_step
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.conversation import Link as Wire
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.terms import FragmentTerms, ModelPlan, StageTerms
from gossamer.protocol.run.manifest import Manifest, SignedManifest, StagedManifest
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.protocol.scripted import ScriptedNetwork

TOKEN_BYTES, VALUE_BYTES, IN_BATCH = 36, 300_000, 4  # several chunks, so that faults fall between them
FRAGMENT_BYTES = 1000  # of the only one, coded
ADDRESSES = ("/ip4/192.0.2.1/tcp/4001",)
PROGRESS_S = 1.0
STILL = "the scripted trainer exchanges no weights"


@dataclass
class ScriptedTrainer:
    """The trainer of one holder and the node's end of the link to it, in memory."""

    payloads: PayloadFolder
    fits: tuple[int, ...]
    num_stages: int
    service_s: float
    choose_stage: Callable[[tuple[int, ...]], Awaitable[int]] | None = None
    stage: int | None = None
    base_step: int = 0  # global step without own steps: of a checkpoint, or of other peers
    added: Counter[str] = field(default_factory=Counter)  # gradients, by the micro-batch's name
    steps: int = 0  # own ones
    num_in_batch: int = 0  # gradients since the last one
    lower_step: int = 0  # typical global step of the lower stage
    losses: list[float] = field(default_factory=list)  # of held-out text, at stage 0
    followed: list[int] = field(default_factory=list)
    served_s: list[float] = field(default_factory=list)  # when each request about a hop was carried out; loop time
    is_over: bool = False  # the neighbouring stage has ended
    has_ended: bool = False  # by itself
    is_under_way: Callable[[int], bool] = lambda hop: True  # whether its node has a hop
    late: list[int] = field(default_factory=list)  # hops that were over, with their files, when it got to them
    adopted: list[int] = field(default_factory=list)  # global steps of states of other peers
    synced: list[int] = field(default_factory=list)  # likewise of fragments
    coded: int = 0  # fragments for others
    wrong_bytes: int = 0  # added to the size of each output
    lies: bool = False  # answers hops with other bytes than honest holders
    opposes: str = ""  # this source of hops
    sources: set[str] = field(default_factory=set)
    state: bytes = bytes(800)  # that others fetch
    picky_at: int | None = None  # the stage at which it adopts no state
    gives_fragments: bool = True
    built_s: float = 0.0  # until its model is there
    is_up: bool = True
    has_begun: bool = False
    total_steps: int = 1_000_000
    budget: ClockBudget = field(default_factory=lambda: ClockBudget(10, 200, 1_000_000))
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asked: dict[int, asyncio.Task[HopReply]] = field(default_factory=dict)
    _begun: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def global_step(self) -> int:
        """Of a stage after the first, that before the end, until its node says that the run is over."""
        is_kept = self.stage not in (0, None) and not (self.is_over or self.has_ended)
        return min(self.base_step + self.steps, self.total_steps - is_kept)

    def end(self) -> None:
        """Reach the end of the run now."""
        self.total_steps, self.has_ended = self.steps, True

    @property
    def plan(self) -> ModelPlan:
        assert self.stage is not None
        stage = StageTerms(self.stage, self.num_stages, TOKEN_BYTES, VALUE_BYTES, IN_BATCH)
        return ModelPlan(16, (FragmentTerms(0, FRAGMENT_BYTES, 0),), len(self.state), stage, next_state_bytes=800)

    # ------------------------------------------------------------------ the node's end of the link

    @property
    def connected(self) -> bool:
        return self.is_up

    async def connect(self) -> ModelPlan:
        await asyncio.sleep(self.built_s)
        if self.stage is None:
            assert self.choose_stage is not None
            self.stage = await self.choose_stage(self.fits)
        return self.plan

    async def run(self, on_report: Callable[[messages.TrainerReport], None]) -> None:
        while True:
            if self.is_up:
                phase = RunPhase.TRAIN if self.global_step < self.total_steps and not self.is_over else RunPhase.FINISH
                on_report(messages.Progress(self.global_step, phase, self.has_begun, tokens=sum(self.added.values())))
            await asyncio.sleep(PROGRESS_S)

    def notify(self, request: messages.Notification) -> None:
        match request:
            case messages.Start():
                self.has_begun = True
            case messages.FollowClock(global_step, is_unlimited):
                self.followed.append(global_step)
                self.is_over |= is_unlimited and global_step >= self.total_steps
                followed = global_step if is_unlimited else self.budget.follow(self.global_step, global_step)
                self.base_step += max(0, followed - self.global_step)
            case messages.StepBack(global_step):
                self.base_step -= max(0, self.global_step - global_step)

    async def request(self, request: messages.AnsweredRequest) -> messages.Reply:
        if not self.is_up:
            raise LinkLost("the trainer is not there")
        if isinstance(request, messages.BringUp | messages.WriteResult):
            return messages.Written(request.name, STILL)
        if isinstance(request, messages.CopyState):
            self.payloads.write(request.name, self.state)
            return messages.Written(request.name, "")
        if isinstance(request, messages.SketchSlow | messages.CodeSlow | messages.DecodeSlow):
            return self._sync(request)
        if isinstance(request, messages.MoveFragments):
            self.synced.append(request.global_step)
            self.base_step += max(0, request.global_step - self.global_step)
            return messages.FragmentsMoved(request.name, {name: 0.0 for names in request.sources for name in names}, "")
        if isinstance(request, messages.Adopt):
            if self.picky_at == self.stage:
                return messages.Adopted(request.name, False, "it is too large", is_sound=False)
            need_size(request.name, len(self.state))
            self.adopted.append(request.global_step)
            self.base_step, self.has_begun = request.global_step - self.steps, True
            return messages.Adopted(request.name, True, "")
        reply = messages.not_done(request, STILL)
        assert reply is not None
        return reply

    async def pass_hop(self, request: HopRequest) -> HopReply:
        if not self.is_up:
            raise LinkLost("the trainer is not there")
        self._asked[request.hop] = working = asyncio.create_task(self._carry_out(request))
        try:
            await asyncio.wait([working])
            if working.cancelled():
                raise LinkLost("the trainer went away")
            return working.result()
        finally:
            self._asked.pop(request.hop, None)
            working.cancel()

    def kill(self) -> None:
        """Die: requests fail, own files and gradients are gone."""
        self.is_up = False
        for asked in self._asked.values():
            asked.cancel()
        self.payloads.clear(Writer.TRAINER)

    # ------------------------------------------------------------------ what a trainer does

    async def _carry_out(self, request: HopRequest) -> HopReply:
        async with self._turn:
            await asyncio.sleep(self.service_s)
            self.served_s.append(asyncio.get_running_loop().time())
            if self._has_files(request):
                return self._reply(request)
            assert not self.is_under_way(request.hop), "files of a hop that is under way are gone"
            self.late.append(request.hop)
            return messages.Declined(request.hop, "its files are gone")

    def _reply(self, request: HopRequest) -> HopReply:
        assert self.stage is not None
        match request:
            case Begin(hop):
                is_measured = next(self._begun) % 20 == 0
                self.payloads.write(hop_file(hop, HopFile.OWN_TOKENS), bytes(TOKEN_BYTES))
                self._write(hop, HopFile.OWN_FORWARD)
                return Forwarded(hop, is_measured, self.global_step)
            case Forward(hop, lower_step=lower_step) if self.stage < self.num_stages - 1:
                self.lower_step = lower_step
                self._write(hop, HopFile.OWN_FORWARD)
                return Forwarded(hop, global_step=self.global_step)
            case Forward(hop, lower_step=lower_step):
                self.lower_step = lower_step
                if not request.measure:
                    self._add(hop, request.name)
                self.sources.add(request.source)
                is_opposed = request.source == self.opposes != ""
                return Returned(hop, 2.5, opposed="other bytes" if is_opposed else "", global_step=self.global_step)
        if request.measure:
            self.losses.append(request.loss)
            return Returned(request.hop, request.loss, global_step=self.global_step)
        odd = None
        if request.copies:
            hops = [request.hop, *(hop for hop, _ in request.copies)]
            answers = {hop: bytes(self.payloads.read(hop_file(hop, HopFile.PARTNER_BACKWARD))) for hop in hops}
            (most, num), *others = Counter(answers.values()).most_common()
            if num == 1:
                return Unlike(request.hop, "other bytes")
            odd = next((hop for hop in hops if answers[hop] != most), None) if others else None
        self._add(request.hop, request.name)
        return Returned(request.hop, request.loss, odd, "other bytes" if odd is not None else "", self.global_step)

    def _sync(self, request: messages.SketchSlow | messages.CodeSlow | messages.DecodeSlow) -> messages.Written:
        if isinstance(request, messages.SketchSlow):
            self.payloads.write(messages.payload_name(request.name, messages.File.OWN_SKETCH), b"")
        if isinstance(request, messages.CodeSlow):
            if not self.gives_fragments:
                return messages.Written(request.name, STILL)
            self.coded += 1
            self.payloads.write(messages.payload_name(request.name, messages.File.OWN_PAYLOAD), bytes(FRAGMENT_BYTES))
        return messages.Written(request.name, "")

    def _has_files(self, request: HopRequest) -> bool:
        """Return whether what a partner has sent for a request is there, as a whole."""
        if isinstance(request, Begin) or (isinstance(request, Backward) and request.measure):
            return True
        file = HopFile.PARTNER_FORWARD if isinstance(request, Forward) else HopFile.PARTNER_BACKWARD
        return len(self.payloads.read(hop_file(request.hop, file))) == VALUE_BYTES

    def _add(self, hop: int, name: str) -> None:
        self.added[name] += 1
        self.num_in_batch += 1
        if self.num_in_batch >= IN_BATCH * batches_to_step(self.global_step - self.lower_step if self.stage else 0):
            self.steps, self.num_in_batch = self.steps + 1, 0
            self.budget.refill()
        if self.stage:
            self._write(hop, HopFile.OWN_BACKWARD, fill=bytes([self.lies]))

    def _write(self, hop: int, file: HopFile, fill: bytes = b"\0") -> None:
        self.payloads.write(hop_file(hop, file), fill * (VALUE_BYTES + self.wrong_bytes))


def need_size(path: str, num_bytes: int) -> None:
    assert len(Path(path).read_bytes()) == num_bytes


class Holder:
    """One peer of a staged run: its home outlives it, the rest is made anew at each start."""

    def __init__(self, run: StagedRun, number: int, fits: tuple[int, ...], service_s: float) -> None:
        self.run = run
        self.identity = Identity(number.to_bytes(4, "little") * 8)
        self.home = Home(run.folder / f"holder-{number}")
        self.home.create()
        self.fits, self.service_s = fits, service_s
        self.saved_step: int | None = None  # of its checkpoint; None: it has none
        self.payloads = PayloadFolder(self.home.path / "payloads")
        self.status = Status()
        self.shunned: list[PartnerShunned] = []
        self.warnings: dict[str, str] = {}  # by topic, in force
        self.condition = Condition(("trainer", "node"))
        self.failure: BaseException | None = None
        self.has_ended = False  # its node, since the last start
        self.num_moves = 0
        self.state = bytes(800)  # that its trainers give
        self.picky_at: int | None = None  # likewise: the stage at which they adopt no state
        self.gives_fragments = True  # likewise
        self._num_starts = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def is_started(self) -> bool:
        return self._num_starts > 0

    @property
    def is_training(self) -> bool:
        return self.peer.node is not None and self.peer.node.carrying is not None and self.trainer.has_begun

    @property
    def carrying(self) -> Carrying:
        assert self.peer.node is not None and self.peer.node.carrying is not None
        return self.peer.node.carrying

    @property
    def pipeline(self) -> Pipeline:
        return self.carrying.pipeline

    def start(self) -> Holder:
        self._num_starts += 1
        self.has_ended = False
        for writer in Writer:
            self.payloads.clear(writer)
        run, network = self.run, self.run.network
        self.trainer = ScriptedTrainer(
            self.payloads, self.fits, run.manifest.num_stages, self.service_s, total_steps=run.manifest.run.total_steps
        )
        self.trainer.state, self.trainer.picky_at, self.trainer.gives_fragments = self.state, self.picky_at, self.gives_fragments
        self.trainer.budget.total_steps = run.manifest.run.total_steps
        if self.saved_step is not None:
            self.trainer.base_step, self.trainer.has_begun = self.saved_step, True
        own = OwnSide(self.trainer, self.payloads, Journal(self.home.journal))  # type: ignore[arg-type]
        held = HeldRun(run.manifest.run_id, run.signed, is_founder=True)
        rng = random.Random(f"{run.seed}/{self.peer_id}/{self._num_starts}")
        self.peer = NodePeer(self.home, held, self.identity, own, network.now_s, rng, self._on_event)
        self.own = own
        self.trainer.is_under_way = lambda hop: hop in self.pipeline.carrier.hops
        transport = network.start_peer(self.peer_id, self._answer, None, None, self.peer.is_banned, self.peer.has_met)
        self._spawn(self._serve(PeerNetwork(transport, network.peers[self.peer_id], lambda: ADDRESSES, self._connected)))
        return self

    def kill(self) -> None:
        """kill -9 of the whole peer; its checkpoint is of this moment."""
        self.saved_step = self.trainer.global_step if self.trainer.has_begun else self.saved_step
        self.run.network.kill(self.peer_id)

    def _start_elsewhere(self) -> None:
        """Start again, as the supervisor does, without a checkpoint of the new stage."""
        self.kill()
        self.saved_step = None
        self.num_moves += 1
        asyncio.get_running_loop().call_later(2.0, self.start)

    def died(self) -> None:
        self.trainer.kill()
        for task in self._tasks:
            task.cancel()
        self.own.journal.close()

    def described(self) -> tuple[str, str, str]:
        """Return state, reason and way out, as the supervisor tells them of a peer whose trainer trains."""
        now_s = self.run.network.now_s()
        self.condition.reports["trainer"].state = "training"
        self.condition.reported_s = now_s
        state = self.condition.describe(1, now_s)
        return state.state, state.reason, state.way_out

    def _on_event(self, event: Event) -> None:
        if isinstance(event, StageMoved):
            asyncio.get_running_loop().call_soon(self._start_elsewhere)
        self.status = apply(self.status, event)
        match event:
            case PartnerShunned():
                self.shunned.append(event)
            case Warned(topic=topic, words=words):
                self.warnings[topic] = words
        self.condition.take_event("node", event, self.run.network.now_s())

    async def _connected(self) -> list[PeerId]:
        return self.run.network.connected(self.peer_id)

    async def _serve(self, network: PeerNetwork) -> None:
        try:
            await self.peer.run(network)
        except Exception as error:
            self.failure = error
        self.has_ended = True

    async def _answer(self, purpose: Purpose, stream: Stream) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self.peer.answer(purpose, stream)
        finally:
            self._tasks.discard(task)

    def _spawn(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class StagedRun:
    """Holders on one network."""

    def __init__(
        self,
        folder: Path,
        num_stages: int,
        num_holders: int,
        seed: int = 0,
        total_steps: int = 1_000_000,
        others: Collection[Identity] = (),
        service_s: float = 0.2,
    ) -> None:
        self.folder, self.seed, self.service_s = folder, seed, service_s
        self.network = ScriptedNetwork(seed, Wire(latency_s=0.02, jitter_s=0.01, bytes_per_s=2e7))
        self.network.on_death(lambda peer_id: [one.died() for one in self.holders if one.peer_id == peer_id and one.is_started])
        self.holders: list[Holder] = []
        members = [str(Identity(number.to_bytes(4, "little") * 8).peer_id) for number in range(1, 2 * num_holders + 2)]
        members += [str(other.peer_id) for other in others]  # on the list, and no holders
        manifest = Manifest.checked(
            {"run": {"access": "allowlist", "members": members, "total_steps": total_steps}, "stages": {"count": num_stages}}
        )
        assert isinstance(manifest, StagedManifest)
        self.manifest = manifest
        self.signed = SignedManifest.sign(manifest, Identity(b"h" * 32))
        for _ in range(num_holders):
            self.add()

    def add(self, service_s: float | None = None, fits: tuple[int, ...] | None = None) -> Holder:
        """Make a peer that is not started yet."""
        holder = Holder(self, len(self.holders) + 1, fits or tuple(range(self.manifest.num_stages)), service_s or self.service_s)
        self.holders.append(holder)
        return holder

    def of(self, stage: int) -> list[Holder]:
        return [holder for holder in self.holders if holder.trainer.stage == stage]

    async def start(self) -> None:
        """Start the holders one after the other, so that each sees who holds what."""
        for holder in self.holders:
            holder.start()
            await self.until(lambda holder=holder: holder.is_training)  # type: ignore[misc]
            await asyncio.sleep(2.0)

    async def until(self, condition: Callable[[], object], within_s: float = 60.0) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        while not condition():
            self.check()
            assert loop.time() < until_s, "it did not come to pass"
            await asyncio.sleep(0.05)

    def check(self) -> None:
        for holder in [holder for holder in self.holders if holder.is_started]:
            if holder.failure is not None:
                raise holder.failure
            assert not holder.trainer.added or max(holder.trainer.added.values()) == 1, "a micro-batch is added twice"

    async def close(self) -> None:
        for holder in self.holders:
            if self.network.is_up(holder.peer_id):
                holder.kill()
        await self.network.close()
        await asyncio.sleep(5.0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks left behind: {left}"


paced = functools.partial(StagedRun, service_s=0.5)  # minutes pass with few hops, which are most of what a story computes


def play(run: StagedRun, story: Callable[[StagedRun], Awaitable[None]]) -> None:
    """Let a story happen in virtual time, and see that it leaves nothing behind."""

    async def inside() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging, "RECONSIDER_S", (0.1, 0.1))  # the holders start one after the other
            await run.start()
            await story(run)
        run.check()
        await run.close()

    virtual_time.run(inside())
