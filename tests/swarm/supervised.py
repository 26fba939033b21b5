"""A real supervisor over a peer of a swarm in memory: node and trainer are tasks of the same virtual time, in place of processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gossamer.peer.link import messages
from gossamer.peer.machine import control_socket, events
from gossamer.peer.machine.child import ChildSettings
from gossamer.peer.machine.config import NODE, PeerConfig
from gossamer.peer.machine.events import QUIET, Event, ProcessReported
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status
from gossamer.peer.node.process import published
from gossamer.peer.supervisor import supervisor as module
from gossamer.peer.supervisor.child_process import ChildExit
from gossamer.peer.supervisor.children import Children, Process
from gossamer.peer.supervisor.condition import Condition
from gossamer.peer.supervisor.housekeeping import Housekeeping
from gossamer.peer.supervisor.pauses import Pauses
from gossamer.peer.supervisor.supervisor import Supervisor
from gossamer.peer.swarm.member_report import MemberReporter
from gossamer.protocol.memory.network import EPOCH_S
from tests.swarm.world import Peer

REPORT_S = 10.0
LOOK_S = 15.0
OVERHEAD_BYTES_PER_S = 500.0  # of the directory and of open connections


class WallClock:
    """The machine's clock, in Unix time: the swarm's virtual time, and by how much the operator has set it."""

    def __init__(self) -> None:
        self.loop_s: Callable[[], float] = lambda: 0.0
        self.set_by_s = 0.0

    def now_s(self) -> float:
        return EPOCH_S + self.loop_s() + self.set_by_s


class TaskProcess:
    """A child of the supervisor that is a task: the settings that it gets, and how it ended."""

    def __init__(self, peer: Peer, on_event: Callable[[Event], None]) -> None:
        self.peer = peer
        self.emit = on_event
        self.pid = 1
        self.settings: ChildSettings | None = None
        self._exit: asyncio.Future[ChildExit] = asyncio.get_running_loop().create_future()

    @property
    def is_running(self) -> bool:
        return not self._exit.done()

    def notify(self, line: bytes) -> None:
        is_first, self.settings = self.settings is None, ChildSettings.model_validate_json(line)
        if is_first:
            self.begin()
        self.take(self.settings)

    def begin(self) -> None:
        raise NotImplementedError

    def take(self, settings: ChildSettings) -> None:
        raise NotImplementedError

    async def wait(self) -> ChildExit:
        return await asyncio.shield(self._exit)

    def end(self, code: int, reason: str) -> None:
        if not self._exit.done():
            self._exit.set_result(ChildExit(code, reason, None))

    def kill(self) -> None:
        raise NotImplementedError


class NodeTask(TaskProcess):
    """The node, and what its process reports beside it."""

    def begin(self) -> None:
        peer = self.peer
        peer.forward, peer.is_done = self.emit, False
        peer.start_node()
        self._paused = asyncio.Event()
        self._tasks = [asyncio.create_task(work) for work in (self._report(), self._report_pauses(), self._until_over())]

    def take(self, settings: ChildSettings) -> None:
        lifecycle = self.peer.lifecycle
        if settings.part is not None:
            lifecycle.figures = published(settings.part)
        if settings.paused:
            lifecycle.pause()
            self._paused.set()
        else:
            lifecycle.resume()

    async def _until_over(self) -> None:
        await self.peer.until_over()
        self._stop(0, "exit code 0")

    async def _report(self) -> None:
        peer, reporter, routes, began_s = self.peer, None, {}, asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(REPORT_S)
            if reporter is None and peer.peer.member is not None:
                reporter = MemberReporter(self.emit, peer.peer.member.gossip)
            if reporter is not None:
                reporter.report()
            now = {str(partner): "direct" for partner in peer.swarm.network.connected(peer.peer_id)}
            if now != routes:
                routes = now
                self.emit(events.ConnectionsChanged(routes))
            peer.link.notify(messages.NodeReport(1e6, 0.0))
            met = peer.status.bytes
            directory = round(OVERHEAD_BYTES_PER_S * (asyncio.get_running_loop().time() - began_s))
            self.emit(events.TrafficCounted(met["sent"] + directory, met["received"] + directory))

    async def _report_pauses(self) -> None:
        while True:
            await self._paused.wait()
            self._paused.clear()
            if self.peer.peer.node is not None:
                await self.peer.node.meetings.until_quiet()
            self.emit(ProcessReported(QUIET, ""))

    def _stop(self, code: int, reason: str) -> None:
        if not self.is_running:
            return
        peer = self.peer
        peer.home.peers.write_bytes(peer.book.to_bytes(asyncio.get_running_loop().time(), peer.peer.time.local_s()))
        peer.kill()
        for task in self._tasks:
            task.cancel()
        self.end(code, reason)

    async def stop(self, grace_s: float) -> ChildExit | None:
        self.peer.peer.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                return await self.wait()
        self.kill()
        return None

    def kill(self) -> None:
        self._stop(-signal.SIGKILL, "killed by SIGKILL")


class TrainerTask(TaskProcess):
    """The trainer. It saves when it ends in order, and once a minute."""

    def begin(self) -> None:
        peer = self.peer
        if peer.num_starts:
            peer.restart_trainer()
        else:
            peer.start_trainer()
        loop = asyncio.get_running_loop()
        self.emit(events.ModelBuilt(12_352, 8.0, coding="torch: no compiler here"))
        peer.trainer.supervision.forward = lambda event: None if loop.is_closed() else loop.call_soon(self.emit, event) and None
        peer.trainer.on_save = self._save
        self._work = asyncio.create_task(self._save_regularly())

    def take(self, settings: ChildSettings) -> None:
        """Do nothing: no test changes a setting that the trainer reads."""

    async def _save_regularly(self) -> None:
        while not self.peer.trainer.is_over:
            await asyncio.sleep(60.0)
            if self.peer.trainer.started:
                self._save()
        self._end(0, "exit code 0")

    def _save(self) -> None:
        peer = self.peer
        peer.save()
        self.emit(events.CheckpointSaved(peer.trainer.replica.own_steps, str(peer.home.checkpoints / "newest"), 200_000, 0.1))

    def _end(self, code: int, reason: str) -> None:
        self._work.cancel()
        self.peer.kill_trainer()
        self.end(code, reason)

    async def stop(self, grace_s: float) -> ChildExit | None:
        if self.settings is None or not self.is_running:
            return None
        if self.peer.trainer.started:
            self.peer.trainer.end()
            self._save()
        await asyncio.sleep(0)
        self._end(0, "exit code 0")
        return await self.wait()

    def kill(self) -> None:
        self._end(-signal.SIGKILL, "killed by SIGKILL")


class TaskChildren(Children):
    """The children of a peer in memory. Its trainer builds the model for `build_s`."""

    build_s = 0.0

    def __init__(
        self, peer: Peer, config: PeerConfig, condition: Condition, emit: Callable[[Event], None], describe: Callable[[], None]
    ) -> None:
        super().__init__(config, str(peer.peer_id), condition, emit, describe)
        self.peer = peer

    async def _started(self, name: str) -> Process:
        make = NodeTask if name == NODE else TrainerTask
        child: object = make(self.peer, lambda event: self._take(name, event))
        await asyncio.sleep(0.0 if name == NODE else self.build_s)
        return child  # type: ignore[return-value]


class SwarmSupervisor(Supervisor):
    """The supervisor of a peer in memory."""

    children: TaskChildren

    def __init__(self, peer: Peer, watch: Callable[[Status], None], **config: object) -> None:
        super().__init__(PeerConfig.model_validate({"home": peer.home.path, **config}), str(peer.peer_id), watch)
        self.peer = peer
        self.children = TaskChildren(peer, self._config, self.condition, self._take, self._describe)
        self._housekeeping = Housekeeping(peer.home, self._records, time.monotonic)
        self._pauses = Pauses(peer.home, time.monotonic)

    def ask(self, **request: object) -> dict[str, object]:
        """Ask as over the control socket."""
        return self._answer(request)

    def child(self, name: str) -> TaskProcess:
        """Return a child that has been started."""
        child: object = self.children._processes[name]
        assert isinstance(child, TaskProcess)
        return child


def prepare(monkeypatch: pytest.MonkeyPatch, clock: WallClock) -> None:
    """Let the machine's clocks be virtual, and let the supervisor have a file for a socket, and no signals."""
    monkeypatch.setattr(time, "time", clock.now_s)
    monkeypatch.setattr(time, "monotonic", lambda: clock.loop_s())
    monkeypatch.setattr(time, "clock_gettime", lambda number: clock.loop_s())
    monkeypatch.setattr(module, "LOOK_S", LOOK_S)
    monkeypatch.setattr(module, "ASKED", {})

    @contextlib.asynccontextmanager
    async def a_file(_home: Home, runtime: Path, _answer: object) -> AsyncIterator[None]:
        (runtime / control_socket.SOCKET_NAME).touch()  # else it is made again
        yield

    monkeypatch.setattr(control_socket, "serving", a_file)
