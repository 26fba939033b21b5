"""A whole trainer in a thread of the test, which plays its supervisor and, over the real link, its node."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.peer.link import messages
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import NodeEnd, TrainerEnd
from gossamer.peer.machine.child import ChildSettings
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import Event, ProcessReported
from gossamer.peer.machine.home import Home
from gossamer.peer.trainer.boundary import Boundary
from gossamer.peer.trainer.exchange import TrainerExchange
from gossamer.peer.trainer.saver import Saver
from gossamer.peer.trainer.text_training import TextTrainer
from gossamer.protocol.run.manifest import Manifest
from tests.peer.small import small_replica
from tests.peer.waiting import eventually


@dataclass
class Supervision:
    """The supervisor's side, as a trainer sees it."""

    settings: ChildSettings
    events: list[Event] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    forward: Callable[[Event], None] = lambda event: None  # gets every event too, in the thread that emits it

    def emit(self, event: Event) -> None:
        self.events.append(event)
        self.forward(event)

    def stop_requested(self) -> bool:
        return self.stop.is_set()

    def states(self) -> list[tuple[str, str]]:
        return [(event.state, event.reason) for event in self.events if isinstance(event, ProcessReported)]


class Node:
    """The node's side of the link, with what it was told."""

    def __init__(self, runtime: Path) -> None:
        self.notices: list[messages.TrainerReport] = []
        self.end = NodeEnd(runtime)
        self.payloads = PayloadFolder(runtime / "payloads")
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self.plan = await self.end.connect()
        await self.end.run(self.notices.append)

    async def gone(self) -> None:
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running

    def dues(self) -> list[messages.Due]:
        return [notice for notice in self.notices if isinstance(notice, messages.Due)]

    def progress(self) -> list[messages.Progress]:
        return [notice for notice in self.notices if isinstance(notice, messages.Progress)]


class RunningTrainer:
    """A trainer thread; `replica` may be looked at from outside once the thread has ended."""

    def __init__(self, folder: Path, runtime: Path, manifest: Manifest, waits_for_start: bool, **config: Any) -> None:
        self.home = Home(folder / "home")
        self.home.create()
        self.runtime = runtime
        self.config = PeerConfig(home=self.home.path, **config)
        self.supervision = Supervision(
            ChildSettings(config=self.config, peer_id="12D3KooX", runtime=runtime, waits_for_start=waits_for_start)
        )
        self.replica = small_replica(runtime / "payloads", manifest, emit=self.supervision.emit)
        self.saver = Saver(self.home, self.config, self.supervision.emit, time.monotonic)
        exchange = TrainerExchange(TrainerEnd(runtime), self.replica.payloads, self.replica, self.supervision.emit, random.Random(0))
        boundary = Boundary(self.supervision, self.replica, exchange, self.saver, time.monotonic, lambda: 0.0)
        self.trainer = TextTrainer(self.supervision, self.replica, boundary)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self.trainer.run()
        except BaseException as error:
            self.error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def events(self, kind: type) -> list[Any]:
        return [event for event in self.supervision.events if isinstance(event, kind)]

    async def ended(self) -> None:
        await eventually(lambda: not self.is_running, "end of the trainer")
        if self.error is not None:
            raise self.error

    async def stopped(self) -> None:
        self.supervision.stop.set()
        await self.ended()


@contextlib.asynccontextmanager
async def trainer(folder: Path, manifest: Manifest, *, waits_for_start: bool = False, **config: Any) -> AsyncIterator[RunningTrainer]:
    with tempfile.TemporaryDirectory(prefix="trainer-") as runtime:
        running = RunningTrainer(folder, Path(runtime), manifest, waits_for_start, **config)
        running.start()
        try:
            async with asyncio.timeout(50):
                yield running
        finally:
            running.supervision.stop.set()
            await eventually(lambda: not running.is_running, "end of the trainer")


@contextlib.asynccontextmanager
async def node(running: RunningTrainer) -> AsyncIterator[Node]:
    one = Node(running.runtime)
    try:
        await eventually(lambda: one.end.connected, "the trainer at the link")
        yield one
    finally:
        await one.gone()
