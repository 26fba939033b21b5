"""A trainer as a coroutine: one real replica, an inner step each `step_s` of virtual time, and the node's requests at the boundaries.

It keeps the rules of peer/trainer/trainer.py, which drives the same replica from a process of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from peer.link import records as ask
from peer.link.socket import LinkLost
from peer.trainer.replica import Replica
from protocol.messages.messages import RunPhase

PROGRESS_S = 1.0
NO_REPLY = (ask.Drop, ask.Solo, ask.Defer, ask.Start, ask.FinishDone)


class Link:
    """Node and trainer's link: a queue, and replies in the order of the requests. `cut` is the death of either end."""

    def __init__(self, on_notice: Callable[[ask.Notice], None]) -> None:
        self.on_notice = on_notice
        self.is_up = True
        self.asked: deque[tuple[ask.Request, asyncio.Future[ask.Reply] | None]] = deque()

    async def request(self, request: ask.AnsweredRequest) -> ask.Reply:
        if not self.is_up:
            raise LinkLost("the trainer is not there")
        reply: asyncio.Future[ask.Reply] = asyncio.get_running_loop().create_future()
        self.asked.append((request, reply))
        return await reply

    def tell(self, request: ask.ToldRequest) -> None:
        if self.is_up:
            self.asked.append((request, None))

    def cut(self) -> None:
        self.is_up = False
        for _, reply in self.asked:
            if reply is not None and not reply.done():
                reply.set_exception(LinkLost("the trainer went away"))


@dataclass
class Checkpoint:
    """What is on a peer's disk of its replica."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


@dataclass
class Trainer:
    """Drives a replica. `frozen` answers requests without making inner steps."""

    replica: Replica
    step_s: float
    started: bool = True
    frozen: bool = False
    link: Link | None = None
    solo: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    handled: list[ask.Request] = field(default_factory=list)
    applied: Counter[str] = field(default_factory=Counter)  # outer steps really taken, by meeting id
    on_handled: Callable[[ask.Request], None] = lambda _: None
    spoil: Callable[[ask.Reply], ask.Reply] = lambda reply: reply  # what a dishonest one makes of its replies
    finish_done: bool = False

    def __post_init__(self) -> None:
        self.replica.on_solo = lambda fragment, reason: self.solo.append(fragment)

    def connect(self, link: Link) -> None:
        """A node comes: whatever the former one had begun has ended."""
        self.replica.lose_node()
        self.link = link
        self._tell_node()
        self._announce(self.replica.countdown.due())

    def disconnect(self) -> None:
        """The node dies. What it had said before is heard; then all that it began is dropped."""
        if self.link is not None:
            self._answer_all()
            self.link = None
            self.replica.lose_node()
            self._announce(self.replica.countdown.due())

    async def run(self) -> None:
        told_s = 0.0
        while not self.finish_done:
            self._answer_all()
            if self.started and not self.frozen and self.replica.phase is RunPhase.TRAIN:
                self.losses.append(self.replica.inner_step().loss)
                self._announce(self.replica.newly_due())
            if (now_s := asyncio.get_running_loop().time()) >= told_s + PROGRESS_S:
                told_s = now_s
                self._tell_node()
            await asyncio.sleep(self.step_s)
        self.replica.end_alone()
        self._tell_node(done=True)

    def save(self) -> Checkpoint:
        tensors = {name: tensor.clone() for name, tensor in self.replica.tensors().items()}
        return Checkpoint(tensors, self.replica.state())

    def _answer_all(self) -> None:
        while self.link is not None and self.link.asked:
            request, waiting = self.link.asked.popleft()
            reply = self._answer(request)
            self.handled.append(request)
            self.on_handled(request)
            reply = None if reply is None else self.spoil(reply)
            assert (reply is None) == isinstance(request, NO_REPLY)
            if waiting is None or waiting.done() or reply is None:
                continue
            if self.link is None:  # died with the reply on its lips
                waiting.set_exception(LinkLost("the trainer went away"))
            else:
                waiting.set_result(reply)

    def _answer(self, request: ask.Request) -> ask.Reply | None:
        match request:
            case ask.Start():
                self._start()
                return None
            case ask.FinishDone():
                self.finish_done = self.replica.phase is RunPhase.FINISH
                return None
        known = set(self.replica.outer.applied)
        reply = self.replica.handle(request)
        if isinstance(request, ask.Apply) and isinstance(reply, ask.Applied) and request.meeting_id not in known:
            self.applied[request.meeting_id] += 1
        if isinstance(reply, ask.Adopted) and reply.accepted:
            self._start()
        return reply

    def _start(self) -> None:
        self.started = True
        self._tell_node()

    def _announce(self, due: list[int]) -> None:
        for fragment in due:
            if self.link is not None and self.link.is_up:
                self.link.on_notice(ask.Due(fragment, self.replica.phase))
            else:
                self.replica.go_alone(fragment, "no node")

    def _tell_node(self, *, done: bool = False) -> None:
        if self.link is not None and self.link.is_up:
            self.link.on_notice(ask.Progress(self.replica.clock_steps, self.replica.phase, self.started, done))
