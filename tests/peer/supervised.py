"""A supervisor over the stand-ins of tests/peer/stand_ins.py, and what a test asks of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import psutil

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import StateChanged, read_events
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.runtime_folder import runtime_folder
from gossamer.peer.machine.status import Status
from gossamer.peer.supervisor.supervisor import Supervisor, Watch
from tests.peer.waiting import eventually

PROGRAMS = {"trainer": "tests.peer.stand_in_trainer", "node": "tests.peer.stand_in_node"}


class Running:
    """A supervisor over stand-ins."""

    def __init__(self, folder: Path, config: dict[str, Any], trainer: str, node: str, manifest: bool, watch: Watch) -> None:
        self.home = Home(folder / "home")
        self.home.create()
        if manifest:
            self.home.manifest.write_bytes(b"a manifest")
        self.does("trainer", trainer)
        self.does("node", node)
        self.supervisor = Supervisor(PeerConfig(home=self.home.path, **config), "12D3KooX", watch, PROGRAMS)

    @property
    def status(self) -> Status:
        return self.supervisor.status

    def does(self, name: str, what: str) -> None:
        (self.home.path / f"{name}.does").write_text(what)

    def ends(self, name: str) -> None:
        (self.home.path / f"{name}.ends").touch()

    def lives(self, name: str) -> list[int]:
        path = self.home.path / f"{name}.lives"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def stopped_ns(self, name: str) -> int:
        path = self.home.path / f"{name}.stopped"
        return int(path.read_text()) if path.exists() else 0

    def states(self) -> list[tuple[str, str]]:
        return [(event.state, event.reason) for event in read_events(self.home.events) if isinstance(event, StateChanged)]

    def num(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in read_events(self.home.events))

    def children(self) -> list[int]:
        return [pid for name in PROGRAMS for pid in self.lives(name) if psutil.pid_exists(pid)]


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(50):
            await test

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def peer(
    folder: Path, *, trainer: str = "train", node: str = "serve", manifest: bool = True, watch: Watch = lambda status: None, **config: Any
) -> AsyncIterator[tuple[Running, asyncio.Task[None]]]:
    running = Running(folder, config, trainer, node, manifest, watch)
    with runtime_folder(0) as runtime:
        work = asyncio.create_task(running.supervisor.run(runtime))
        try:
            yield running, work
        finally:
            running.supervisor.leave("the test is over")
            await asyncio.wait([work])
            assert not running.children()
            assert not running.home.running.exists()
        assert [path.name for path in runtime.iterdir()] in (["lock"], ["lock", "control.sock"], ["control.sock", "lock"])


async def until_training(running: Running) -> None:
    await eventually(lambda: running.status.state == "training" and running.status.peers_seen, "training with a node")
