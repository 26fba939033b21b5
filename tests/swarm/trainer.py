"""The real trainer as a coroutine: a turn of its loop each `step_s` of virtual time, and a link in memory between it and its node.

The coding thread really runs; whatever is put into the trainer's end of the link waits until that thread has nothing to do again, so a
story goes the same way each time.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from gossamer.peer.link import messages
from gossamer.peer.link.socket import LinkLost
from gossamer.peer.machine.child import ChildSettings
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import Event, OutputsMoved, SoloStep, StepDone
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import has_stepped
from gossamer.peer.trainer.boundary import Boundary, State
from gossamer.peer.trainer.exchange import TrainerExchange
from gossamer.peer.trainer.fragment_state import FragmentState
from gossamer.peer.trainer.meeting import MeetingSide
from gossamer.peer.trainer.replica import ALONE, Replica
from gossamer.peer.trainer.saver import Saver
from gossamer.peer.trainer.text_training import TextTrainer
from gossamer.protocol.messages.terms import ModelPlan
from tests.peer.trainer_thread import Supervision
from tests.swarm.tiny import CountedReplica


class Link:
    """A NodeEnd in memory: like a socket, it keeps what the trainer reports until it runs. `cut` is the death of the trainer."""

    def __init__(self, plan: ModelPlan) -> None:
        self.is_up = True
        self.end: End | None = None
        self._plan = plan
        self._unread: list[messages.TrainerReport] = []
        self._on_notice: Callable[[messages.TrainerReport], None] = self._unread.append
        self._waiting: dict[int | str, asyncio.Future[messages.Reply]] = {}

    async def connect(self) -> ModelPlan:
        return self._plan

    async def run(self, on_report: Callable[[messages.TrainerReport], None]) -> None:
        self._on_notice = on_report
        for notice in self._unread:
            on_report(notice)
        await asyncio.Future()

    async def request(self, request: messages.AnsweredRequest) -> messages.Reply:
        if not self.is_up or self.end is None:
            raise LinkLost("the trainer is not there")
        about = messages.subject(request)
        assert about not in self._waiting, "asked before the reply to an earlier request"
        self._waiting[about] = reply = asyncio.get_running_loop().create_future()
        self.end.put(request)
        return await reply

    def notify(self, request: messages.Notification) -> None:
        if self.is_up and self.end is not None:
            self.end.put(request)

    def take(self, record: messages.Answer) -> None:
        if not self.is_up:  # either end died with this on its lips
            return
        if isinstance(record, messages.TrainerReport):
            self._on_notice(record)
        elif not (waiting := self._waiting.pop(messages.subject(record))).done():
            waiting.set_result(record)

    def cut(self) -> None:
        self.is_up = False
        while self._waiting:
            _, waiting = self._waiting.popitem()
            if not waiting.done():
                waiting.set_exception(LinkLost("the trainer went away"))


class End:
    """A TrainerEnd in memory: requests, and numbers of sessions that begin (0: ends), are taken one by one by the coding thread."""

    def __init__(self) -> None:
        self.session = 0
        self.sent: list[messages.Answer] = []
        self._coming: SimpleQueue[messages.Request | int | None] = SimpleQueue()
        self._idle: SimpleQueue[None] = SimpleQueue()  # one for each time that the thread began to wait
        self._next: messages.Request | int | None = None
        self._is_served = False

    def put(self, item: messages.Request | int) -> None:
        self._coming.put(item)
        if self._is_served:
            self._idle.get()

    def serve(self, start: Callable[[], None]) -> None:
        """Start the thread, and have it take what came before."""
        self._is_served, num_turns = True, self._coming.qsize() + 1
        start()
        for _ in range(num_turns):
            self._idle.get()

    def wake(self) -> None:
        self._is_served = False
        self._coming.put(None)

    def wait(self, seconds: float) -> None:
        self._idle.put(None)
        self._next = self._coming.get() if self._is_served else None

    def poll(self) -> list[messages.Request]:
        if isinstance(self._next, int):
            self.session = self._next
        return [] if self._next is None or isinstance(self._next, int) else [self._next]

    def send(self, record: messages.Answer, session: int) -> None:
        if session and session == self.session:
            self.sent.append(record)

    def close(self) -> None:
        self.session = 0


@dataclass
class Checkpoint:
    """What is on a peer's disk of its replica."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Disk(Saver):
    """Keeps nothing: what survives a peer, the test saves, when it wants or `on_save`."""

    on_save: Callable[[], None]

    def save(self, replica: Replica) -> None:
        self.has_checkpoint = True
        self.on_save()

    def begin(self, replica: Replica, reading: AbstractContextManager[None] = ALONE) -> None:
        self.has_checkpoint = True

    def is_due(self, replica: Replica) -> bool:
        return False


class Trainer:
    """Drives the real trainer. `frozen`, it answers requests without making inner steps."""

    def __init__(self, replica_of: Callable[[Callable[[Event], None]], CountedReplica], step_s: float, waits_for_start: bool) -> None:
        config = PeerConfig(home=Path("unused"))
        self._child = child = Supervision(ChildSettings(config=config, peer_id="", runtime=config.home, waits_for_start=waits_for_start))
        self.replica = replica_of(child.emit)
        self.frozen = False
        self.handled: list[messages.Reply] = []
        self.on_handled: Callable[[messages.Reply], None] = lambda _: None
        self.spoil: Callable[[messages.Reply], messages.Reply] = lambda reply: reply  # what a dishonest one makes of its replies
        self._step_s = step_s
        self._num_nodes = 0
        self._link: Link | None = None
        self._end = End()
        now_s = asyncio.get_running_loop().time
        self._exchange = TrainerExchange(self._end, self.replica.payloads, self.replica, child.emit, random.Random(0))
        self.on_save: Callable[[], None] = lambda: None
        saver = Disk(Home(config.home), config, child.emit, now_s)
        saver.on_save = lambda: self.on_save()
        self._exchange.window_s = 0.0  # real time, in which nothing happens here
        self._boundary = Boundary(child, self.replica, self._exchange, saver, now_s, lambda: 0.0)
        self._real = TextTrainer(child, self.replica, self._boundary)

    @property
    def supervision(self) -> Supervision:
        return self._child

    @property
    def started(self) -> bool:
        return self._boundary.state is not State.READY

    @property
    def is_over(self) -> bool:
        return self._boundary.state is State.OVER

    @property
    def applied(self) -> Counter[str]:
        return self.replica.counted

    @property
    def solo(self) -> list[int]:
        return [event.fragment for event in self._child.events if isinstance(event, SoloStep)]

    @property
    def moved_outputs(self) -> list[OutputsMoved]:
        return [event for event in self._child.events if isinstance(event, OutputsMoved)]

    @property
    def losses(self) -> list[float]:
        return [event.loss for event in self._child.events if isinstance(event, StepDone) and has_stepped(event)]

    def connect(self, link: Link) -> None:
        """A node comes: whatever the former one had begun has ended."""
        self._num_nodes += 1
        self._link, link.end = link, self._end
        self._end.put(self._num_nodes)

    def disconnect(self) -> None:
        """The node dies. What it had said before is heard; then all that it began is dropped, and what it was not yet told is lost."""
        self._end.put(0)
        self._end.sent.clear()

    async def run(self) -> None:
        try:
            self._end.serve(self._boundary.start)
            while self._boundary.state is not State.OVER:
                _ = self._boundary.answer() if self.frozen else self._real.tick()
                self._deliver()
                await self._pass_step()
            self._boundary.end()
            self._deliver()
        finally:
            self._end.wake()
            self._boundary.close()

    async def _pass_step(self) -> None:
        """Let the time of an inner step pass."""
        await asyncio.sleep(self._step_s)

    def end(self) -> None:
        """Do what a trainer does last, when it is asked to stop."""
        self._boundary.end()
        self._deliver()

    def replace_side(self, meeting: int, side_of: Callable[[FragmentState], MeetingSide]) -> None:
        """Put another side in the place of an open meeting's, for a trainer that does not do what the real one does."""
        opened = self._exchange._meetings[meeting]
        opened.side = side_of(opened.side.state)

    def save(self) -> Checkpoint:
        tensors = {name: tensor.clone() for name, tensor in self.replica.kept().tensors.items()}
        return Checkpoint(tensors, self.replica.kept().state)

    def _deliver(self) -> None:
        sent, self._end.sent = self._end.sent, []
        for record in sent:
            if not isinstance(record, messages.TrainerReport):
                self.handled.append(record)
                self.on_handled(record)
                record = self.spoil(record)
            if self._link is not None:
                self._link.take(record)
