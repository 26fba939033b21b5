"""The supervisor: starts the node and the trainer of one peer, restarts what dies, answers the control socket, and stops both cleanly.

Light on purpose: no torch, no hivemind. It holds the home's lock and owns the runtime folder, so whatever way its children end,
nothing of them stays behind; the children end with it (peer/child.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer import control
from peer.child import ChildSettings
from peer.config import PeerConfig
from peer.events import EventLog, NodeRestarted, StateChanged, TrainerRestarted
from peer.home import Home
from peer.process import ChildProcess, Exit
from peer.runtime import runtime_folder
from peer.status import Status
from protocol.errors import ExitCode, GossamerError
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.manifest import SignedManifest

RESTART_PAUSE_S = (0.5, 30.0)  # first and longest pause before a child is started again
MAX_RESTARTS = 8  # of one child that never got going; then the fault is ours and restarting hides it
HEALTHY_S = 60.0  # a child that lived so long starts from a clean slate
LEAVE_S = {"peer.node_process": 5.0, "peer.trainer": 4.0}  # to end meetings, then to save, before they are killed; in this order
PAYLOAD_BYTES = 64 << 20  # room wanted in the runtime folder before the model's size is known

Watch = Callable[[Status], None]


class ChildFailed(GossamerError):
    """A child process ended with an error that restarting cannot mend."""

    def __init__(self, message: str, *, hint: str, exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = ExitCode(exit_code) if exit_code in set(ExitCode) else ExitCode.OUR_FAULT


class Supervisor:
    """One peer on this machine. Make one, `run` it once."""

    def __init__(self, config: PeerConfig, watch: Watch) -> None:
        self.status = Status()
        self._config = config
        self._home = Home(config.home)
        self._watch = watch
        self._events = EventLog(self._home.events)
        self._leaving = asyncio.Event()
        self._manifest_ready = asyncio.Event()
        self.interrupted = False  # by Ctrl-C
        self._children: dict[str, ChildProcess] = {}

    async def run(self, runtime: Path) -> None:
        """Run the peer until its run ends or it is asked to leave. Raises GossamerError when it cannot go on."""
        told_to_start = not self._config.alone and (self._home.invite.exists() or self._config.wait_for_peers > 0)
        settings = ChildSettings(self._config, runtime, told_to_start, os.getpid())
        if self._home.manifest.exists():
            self._manifest_ready.set()
        self._enter("starting", "")
        async with control.serving(self._home, runtime, self._answer):
            with self._signals():
                work = [asyncio.create_task(self._keep("peer.trainer", settings, self._manifest_ready))]
                if not self._config.alone:
                    work.append(asyncio.create_task(self._keep("peer.node_process", settings, None)))
                try:
                    await self._until_over(work)
                finally:
                    await self._stop(work)

    async def _until_over(self, work: list[asyncio.Task[None]]) -> None:
        trainer = work[0]
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            done, _ = await asyncio.wait([*work, leaving], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {leaving}:
                task.result()  # raises what ended it
            if trainer in done:
                self._enter("done", "the run is over")
        finally:
            leaving.cancel()

    async def _stop(self, work: list[asyncio.Task[None]]) -> None:
        if self._leaving.is_set():
            self._enter("leaving", "asked to")
        for task in work:
            task.cancel()  # no more restarts
        await asyncio.gather(*work, return_exceptions=True)
        for module, grace_s in LEAVE_S.items():
            if module in self._children:
                await self._children[module].stop(grace_s)
        if self._leaving.is_set():
            self._enter("left", "saved and gone")

    # ------------------------------------------------------------------ children

    async def _keep(self, module: str, settings: ChildSettings, when: asyncio.Event | None) -> None:
        """Start a child again whenever it dies. Returns when it ended as it should; raises ChildFailed."""
        restarts = 0
        while True:
            child = ChildProcess(module, self._home.log, self._on_report)
            self._children[module] = child
            await child.start()
            if when is not None:
                await when.wait()
            started_s = time.monotonic()
            child.tell(settings.to_line())
            exit = await child.wait()
            if exit.code == 0:
                return
            if exit.failure is not None and exit.failure["exit_code"] != ExitCode.OUR_FAULT:
                raise ChildFailed(exit.failure["error"], hint=exit.failure["hint"], exit_code=exit.failure["exit_code"])
            restarts = 1 if time.monotonic() - started_s > HEALTHY_S else restarts + 1
            if restarts > MAX_RESTARTS:
                raise ChildFailed(f"{module} failed {restarts} times: {exit.reason}", hint=f"see {self._home.log}", exit_code=1)
            self._note_restart(module, exit, restarts)
            await asyncio.sleep(min(RESTART_PAUSE_S[1], RESTART_PAUSE_S[0] * 2 ** (restarts - 1)))

    def _note_restart(self, module: str, exit: Exit, restarts: int) -> None:
        kind = NodeRestarted if module == "peer.node_process" else TrainerRestarted
        self._events.append(kind(exit.reason, restarts))
        self._enter(self.status.state, f"restarting the {module.removeprefix('peer.')}: {exit.reason}")

    def _on_report(self, report: dict[str, Any]) -> None:
        kind = report.pop("kind")
        if kind == "failed":
            return
        if report.pop("manifest_ready", False):
            self._manifest_ready.set()
        if "solo" in report:
            self.status.meetings["solo"] = report.pop("solo")
        self.status.meetings.update(report.pop("meetings", {}))
        state, reason = report.pop("state", None), report.pop("reason", "")
        for skipped in ("ready", "build_seconds", "finished"):
            report.pop(skipped, None)
        self.status.update(report)
        if state is not None and not self._leaving.is_set():
            self._enter(state, reason)
        else:
            self._watch(self.status)

    # ------------------------------------------------------------------ asking and leaving

    def leave(self) -> None:
        """Finish or drop the current meetings, save, announce, and end."""
        self._leaving.set()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.get("verb"):
            case "status":
                return self.status.to_json()
            case "leave":
                self.leave()
                return {"leaving": True}
            case verb:
                return {"error": f"there is no verb {verb!r}"}

    @contextlib.contextmanager
    def _signals(self) -> Any:
        """The first SIGTERM or Ctrl-C leaves cleanly, a second one ends at once."""
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if self._leaving.is_set():
                for child in self._children.values():
                    child.kill()
                os._exit(ExitCode.INTERRUPTED)
            self.interrupted = number == signal.SIGINT
            self.leave()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _enter(self, state: str, reason: str) -> None:
        if self.status.enter(state, reason, time.time()):
            self._events.append(StateChanged(state, reason))
        self._watch(self.status)


async def run_peer(config: PeerConfig, manifest: SignedManifest | None, invite: Invite | None, watch: Watch) -> Status:
    """Run one peer until its run ends, it is asked to leave, or it cannot go on.

    A manifest makes it the run's host, an invite a member; with neither, it goes on with what its home folder holds. `watch` is called
    with the live status after every change, on the event loop. Returns the last status. Raises GossamerError; KeyboardInterrupt after
    Ctrl-C.
    """
    home = Home(config.home)
    home.create()
    with home.locked(), runtime_folder(PAYLOAD_BYTES) as runtime:
        identity = Identity.load_or_create(home.identity)
        if manifest is not None:
            home.manifest.write_bytes(manifest.to_bytes())
        if invite is not None:
            home.invite.write_text(invite.to_text() + "\n")
        supervisor = Supervisor(config, watch)
        supervisor.status.peer_id = str(identity.peer_id)
        await supervisor.run(runtime)
        if supervisor.interrupted:
            raise KeyboardInterrupt
        return supervisor.status
