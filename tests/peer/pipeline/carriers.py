"""Several carriers in one virtual time: lanes that carry messages in order, trainers that count rows, and faults at any event.

Nothing here is a mock: the carriers are the product's; lanes, trainers and the payload folder are what surrounds them, with delays drawn at
random. Every event of every carrier is followed by a check of what must always hold.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gossamer.peer.link.messages import (
    Backward,
    Begin,
    Declined,
    Forward,
    Forwarded,
    HopFile,
    HopReply,
    HopRequest,
    Returned,
    Unlike,
    hop_file,
)
from gossamer.peer.pipeline import commands, events
from gossamer.peer.pipeline.carrier import Carrier
from gossamer.peer.pipeline.commands import HopOutcome
from gossamer.peer.pipeline.hop import HopState
from gossamer.peer.pipeline.lane import MOST_PATIENCE_S, DownLane, UpLane
from gossamer.protocol.errors import PeerMisbehaved
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import Chunk, HopForward, HopNotice, Message, NoticeKind
from gossamer.protocol.messages.terms import StageTerms

TOKEN_BYTES, VALUE_BYTES, IN_BATCH = 20, 60, 4
CHUNK_BYTES = 16  # small, so that notices come between chunks
LOOK_S = 1.0  # between two looks of a node at its trainer
AGAIN_S = 1.0  # after which a lost lane or holder is back
MOST_HOP_S = 3 * MOST_PATIENCE_S  # until a hop that a lower holder has sent is over


@dataclass
class Wire:
    """One lane between two holders: what each has sent that has not arrived, in order."""

    low: Holder
    high: Holder
    number: int
    is_open: bool = True
    arrives_s: dict[int, float] = field(default_factory=dict)  # of the last message to each side, so that order is kept
    withdrawn: int = 0  # the hop whose withdrawal is on its way until `withdrawn_s`: later hops come behind that notice
    withdrawn_s: float = 0.0


@dataclass
class Holder:
    """One holder with its trainer. A new life begins with no hop, no lane and no memory of names, but those of a trainer that lived on."""

    name: str
    stage: int
    world: World
    service_s: float
    declines: float = 0.0  # share of requests that its trainer declines
    unlike: float = 0.0  # share of doubled hops whose answers its trainer finds unlike
    odd: float = 0.0  # share of doubled hops of which its trainer finds one answer odd
    is_alive: bool = True
    carrier: Carrier = field(init=False)
    files: dict[str, int] = field(default_factory=dict)
    added: Counter[bytes] = field(default_factory=Counter)  # gradients in this life, by the micro-batch's name
    earlier: set[bytes] = field(default_factory=set)  # names that this trainer added for an earlier node, and adds no more
    jobs: list[HopRequest] = field(default_factory=list)
    current: HopRequest | None = None
    outcomes: Counter[HopOutcome] = field(default_factory=Counter)
    wires: dict[int, Wire] = field(default_factory=dict)
    withdrawn: dict[int, set[int]] = field(default_factory=dict)  # by lane: numbers of which nothing more is sent
    faults: list[str] = field(default_factory=list)  # that it blamed on partners
    begun: set[int] = field(default_factory=set)  # at stage 0: hops that its trainer was asked to begin, and that are not over
    arrived_s: dict[int, float] = field(default_factory=dict)  # when each hop was first there
    num_doubled: int = 0  # backward passes with several answers
    due_s: float = math.inf  # for which its carrier's next look at the time is set
    life: int = 0
    trainer: int = 0  # number of its trainer

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.life += 1
        terms = StageTerms(self.stage, self.world.num_stages, TOKEN_BYTES, VALUE_BYTES, IN_BATCH)
        rng = random.Random(self.world.rng.random())
        self.carrier = Carrier(terms, rng, itertools.count(1000 * self.life))
        self.carrier.may_begin = self.world.begins
        self.is_alive, self.current, self.due_s = True, None, math.inf
        for kept in (self.files, self.added, self.jobs, self.wires, self.withdrawn, self.begun, self.arrived_s):
            kept.clear()

    def take(self, event: events.Event) -> None:
        """Hand an event to the carrier, carry out its commands, and check what must hold."""
        if not self.is_alive:
            return
        for command in self.carrier.handle(event, self.world.now_s):
            self._carry_out(command)
        self._check()
        due_s = max(self.world.now_s, self.carrier.next_s)
        if due_s != self.due_s and due_s < math.inf:
            self.world.at(due_s, self._tick, self.life)
        self.due_s = due_s

    def _tick(self, life: int) -> None:
        if life == self.life and self.carrier.next_s <= self.world.now_s:
            self.due_s = math.inf
            self.take(events.TimePassed())

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.AskForHop(request):
                if isinstance(request, Begin):
                    self.begun.add(request.hop)
                self.jobs.append(request)
                self._work()
            case commands.SendHop(lane, hop, message, files):
                if any(self.files.get(file) != num_bytes for _, file, num_bytes in files):
                    self.world.after(0.0, self._if_alive(lambda: self.take(events.FileLost(hop))))
                    return
                chunks = [(part, offset, num_bytes) for part, _, num_bytes in files for offset in range(0, num_bytes, CHUNK_BYTES)]
                self._send(lane, message)
                for part, offset, num_bytes in chunks:
                    chunk = Chunk(part, offset, bytes(min(CHUNK_BYTES, num_bytes - offset)))
                    self._send(lane, chunk, message.number if isinstance(message, HopForward) else None)
                if not isinstance(message, HopForward):
                    wire = self.wires.get(lane)
                    arrives_s = self.world.now_s if wire is None else wire.arrives_s[id(wire.low)]
                    left_s = self.world.rng.uniform(self.world.now_s, arrives_s)  # before the partner can have the last byte
                    self.world.after(left_s - self.world.now_s, self._if_alive(lambda: self.take(events.HopSent(hop))))
            case commands.SendNotice(lane, notice):
                if notice.notice is NoticeKind.WITHDRAWN:
                    self.withdrawn.setdefault(lane, set()).add(notice.number)
                self._send(lane, notice)
            case commands.StoreChunk(_, file, data, is_first):
                self.files[file] = len(data) + (0 if is_first else self.files[file])
            case commands.RemoveHop(hop):
                for kind in HopFile:
                    self.files.pop(hop_file(hop, kind), None)
            case commands.CloseLane(lane, reason, fault, _):
                if fault is not None:
                    self.faults.append(reason)
                self.world.close(self.wires.pop(lane), self)
            case commands.HopOver(hop, outcome):
                self.outcomes[outcome] += 1
                self.begun.discard(hop)
            case commands.HearClock() | commands.AnswersCompared():
                pass

    def _if_alive(self, call: Callable[[], None]) -> Callable[[], None]:
        life = self.life

        def run() -> None:
            if self.is_alive and self.life == life:
                call()

        return run

    def _send(self, lane: int, message: Message, of: int | None = None) -> None:
        """Send on a lane: chunks of a withdrawn hop stop at that moment."""
        wire = self.wires.get(lane)
        if wire is not None:
            jumps = isinstance(message, HopNotice)
            number = message.number if isinstance(message, HopForward) else of or 0
            self.world.deliver(wire, self, message, lambda: of in self.withdrawn.get(lane, ()), number, jumps=jumps)

    # ------------------------------------------------------------------ the trainer

    def _work(self) -> None:
        if self.jobs and self.current is None:
            self.jobs.sort(key=lambda job: not isinstance(job, Backward))
            self.current, trainer = self.jobs.pop(0), self.trainer
            job = self.current
            self.world.after(self.service_s * (0.5 + self.world.rng.random()), self._if_alive(lambda: self._finish(job, trainer)))

    def _finish(self, job: HopRequest, trainer: int) -> None:
        if trainer != self.trainer:
            return
        self.current = None
        reply = self._reply(job)
        self.take(events.TrainerReplied(reply))
        self._work()

    def _look(self) -> None:
        """Let the carrier begin hops, as its node does at each look at a trainer that trains."""
        self.carrier.may_begin = self.world.begins
        self.take(events.TimePassed())

    def _reply(self, job: HopRequest) -> HopReply:
        if self.world.rng.random() < self.declines:
            self.world.after(LOOK_S, self._if_alive(self._look))
            return Declined(job.hop, "drawn")
        match job:
            case Begin():
                self.files[hop_file(job.hop, HopFile.OWN_TOKENS)] = TOKEN_BYTES
                self.files[hop_file(job.hop, HopFile.OWN_FORWARD)] = VALUE_BYTES
                return Forwarded(job.hop, measure=self.world.rng.random() < 0.1)
            case Forward() if self.stage < self.world.num_stages - 1:
                self.files[hop_file(job.hop, HopFile.OWN_FORWARD)] = VALUE_BYTES
                return Forwarded(job.hop)
            case Forward():
                return Returned(job.hop, 2.0) if job.measure else self._add(job, 2.0)
        if job.copies:
            self.num_doubled += 1
            if self.world.rng.random() < self.unlike:
                return Unlike(job.hop, "drawn")
        reply = Returned(job.hop, job.loss) if job.measure else self._add(job, job.loss)
        if isinstance(reply, Returned) and job.copies and self.world.rng.random() < self.odd:
            return replace(reply, odd=self.world.rng.choice([job.hop, *(number for number, _ in job.copies)]))
        return reply

    def _add(self, job: Forward | Backward, loss: float) -> HopReply:
        hop, name = job.hop, bytes.fromhex(job.name)
        if name in self.earlier:
            return Declined(hop, "the micro-batch is added already")
        self.added[name] += 1
        if self.stage:
            self.files[hop_file(hop, HopFile.OWN_BACKWARD)] = VALUE_BYTES
        return Returned(hop, loss)

    # ------------------------------------------------------------------ what must always hold

    def _check(self) -> None:
        assert not self.added or max(self.added.values()) == 1, f"{self.name} has added a micro-batch twice"
        for lane in self.carrier.down.values():
            assert len(lane.unanswered) <= max(lane.window, self.world.most_window), "beyond the window"
        for hop in self.carrier.hops.values():
            assert hop.state is not HopState.OVER
            assert hop.tries <= 3 and (hop.away is not None) is (hop.state in (HopState.AWAY, HopState.RETURNING))
            assert hop.source is None or self.world.now_s - self.arrived_s.setdefault(hop.number, self.world.now_s) <= MOST_HOP_S
        assert self.begun <= self.carrier.hops.keys(), "a window is neither trained nor passed over"
        numbers = {name.split(".")[0] for name in self.files}
        known = {f"hop-{number}" for number in (*self.carrier.hops, *self.carrier._lost, *(job.hop for job in self.jobs))}
        assert numbers <= known, "files of a hop that is over"
        assert len(self.carrier.hops) <= 2 * IN_BATCH * 3


class World:
    """Holders, lanes and a clock."""

    def __init__(self, num_stages: int, num_holders: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num_stages = num_stages
        self.most_window = 2 * IN_BATCH
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._ticks = itertools.count()
        self._lanes = itertools.count(1)
        self.num_events = 0
        self.begins = True  # drivers begin micro-batches
        self.tamper: Callable[[Message], list[Message | PeerMisbehaved]] = lambda message: [message]  # what arrives in place of a message
        self.stages = [
            [Holder(f"{stage}.{n}", stage, self, 0.05 + 0.1 * self.rng.random()) for n in range(num_holders)] for stage in range(num_stages)
        ]
        self.open_all()

    @property
    def holders(self) -> list[Holder]:
        return [holder for stage in self.stages for holder in stage]

    @property
    def trained(self) -> int:
        return sum(holder.outcomes[HopOutcome.TRAINED] for holder in self.stages[0])

    def after(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        self.at(self.now_s + delay_s, call, *args)

    def at(self, when_s: float, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._heap, (when_s, next(self._ticks), lambda: call(*args)))

    def run_until(self, until_s: float, fault: Callable[[], None] | None = None, at_event: int = -1) -> None:
        """Run; `fault` happens before the event of that number."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, call = heapq.heappop(self._heap)
            self.num_events += 1
            if fault is not None and self.num_events == at_event:
                fault()
            call()
        self.now_s = until_s

    def run_until_trained(self, within_s: float) -> float:
        """Run until a driver makes progress, which it must within this time of the last fault; return the seconds."""
        began_s, trained = self.now_s, self.trained
        while self.trained == trained:
            self.run_until(self.now_s + 0.25)
            assert self.now_s - began_s <= within_s, f"no driver makes progress for {within_s:.0f} s after the last fault"
        return self.now_s - began_s

    # ------------------------------------------------------------------ lanes

    def open_all(self) -> None:
        """Open a lane between all neighbours that live and have none, the higher stages first."""
        for stage in range(self.num_stages - 2, -1, -1):
            for low, high in itertools.product(self.stages[stage], self.stages[stage + 1]):
                linked = any(wire.high is high for wire in low.wires.values())
                if low.is_alive and high.is_alive and not linked and high.carrier.is_complete:
                    self._open(low, high)

    def _open(self, low: Holder, high: Holder) -> None:
        number, window = next(self._lanes), high.carrier.window
        wire = low.wires[number] = high.wires[number] = Wire(low, high, number)
        peer = Identity(bytes([number % 256]) * 32).peer_id
        high.take(events.LaneOpened(UpLane(number, peer, window)))
        low.carrier.doubling.groups[peer] = high.name
        low.take(events.LaneOpened(DownLane.opened(number, peer, window, low.carrier.stage)))
        assert wire.is_open

    def deliver(self, wire: Wire, sender: Holder, message: Message, is_stopped: Callable[[], bool], number: int, *, jumps: bool) -> None:
        """Have a message arrive. `number`: the hop that it carries upwards; 0: none."""
        taker = wire.high if sender is wire.low else wire.low
        arrives_s = max(self.now_s + 0.01 * self.rng.random(), 0.0 if jumps else wire.arrives_s.get(id(taker), 0.0))
        if jumps and isinstance(message, HopNotice) and message.notice is NoticeKind.WITHDRAWN:
            arrives_s = max(arrives_s, self.now_s + 0.01)  # behind what has left already
            is_other_near = self.now_s < wire.withdrawn_s
            wire.withdrawn = min(wire.withdrawn, message.number) if is_other_near else message.number
            wire.withdrawn_s = arrives_s
            wire.arrives_s[id(taker)] = max(arrives_s + 1e-6, wire.arrives_s.get(id(taker), 0.0))
        wire.arrives_s[id(taker)] = max(arrives_s, wire.arrives_s.get(id(taker), 0.0))

        def arrive() -> None:
            if not (wire.is_open and taker.is_alive) or is_stopped():
                return
            if number > wire.withdrawn and self.now_s < wire.withdrawn_s:
                if number in sender.withdrawn.get(wire.number, ()):
                    return  # withdrawn before it has left
                self.after(wire.withdrawn_s - self.now_s, arrive)
                return
            for changed in self.tamper(message):
                if isinstance(changed, PeerMisbehaved):
                    taker.faults.append(str(changed))
                    self.close(wire, None)
                    return
                taker.take(events.LaneSaid(wire.number, changed))

        self.after(arrives_s - self.now_s, arrive)

    def close(self, wire: Wire, by: Holder | None) -> None:
        """End a lane; each side but the one that ended it hears of it a moment later."""
        wire.is_open = False
        for holder in (wire.low, wire.high):
            if holder is not by:
                holder.wires.pop(wire.number, None)
                self.after(0.01 * self.rng.random(), holder._if_alive(lambda holder=holder: holder.take(events.LaneGone(wire.number))))  # type: ignore[misc]
        self.after(AGAIN_S, self.open_all)

    # ------------------------------------------------------------------ faults

    def kill(self, holder: Holder, back_s: float = AGAIN_S, *, node_only: bool = False) -> None:
        """Kill a node, with its trainer or alone; it starts again later. A trainer that lives on may have added what it computed then."""
        if not node_only:
            holder.earlier.clear()
        else:
            holder.earlier |= holder.added.keys()
            if isinstance(holder.current, Backward) and self.rng.random() < 0.5:
                holder.earlier.add(bytes.fromhex(holder.current.name))
        holder.is_alive = False
        for wire in list(holder.wires.values()):
            self.close(wire, holder)

        def again() -> None:
            holder.start()
            self.open_all()

        self.after(back_s, again)

    def kill_trainer(self, holder: Holder) -> None:
        """Kill a trainer: its requests fail, its files are gone, and what it has added is too."""
        holder.trainer += 1
        requests = [hop.number for hop in holder.carrier.hops.values() if hop.state in (HopState.QUEUED, HopState.BACKWARD)]
        requests += holder.carrier._lost
        holder.jobs.clear()
        holder.current = None
        holder.earlier.clear()
        holder.files = {name: size for name, size in holder.files.items() if ".own-" not in name}
        for number in requests:
            holder.take(events.HopLost(number))
        holder.carrier.may_begin = self.begins
        holder.take(events.TimePassed())

    def stop(self) -> None:
        """Have the drivers begin nothing any more."""
        self.begins = False
        for holder in self.stages[0]:
            holder.carrier.may_begin = False

    def cut(self, wire: Wire) -> None:
        """Break a lane."""
        self.close(wire, None)
