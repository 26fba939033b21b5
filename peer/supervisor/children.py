"""The node and the trainer of one peer: started, started again when they die, and ended for a pause, for other settings, or for good."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gossamer.peer.machine import events
from gossamer.peer.machine.child import ChildSettings, OwnPart
from gossamer.peer.machine.config import NODE, TRAINER, PeerConfig
from gossamer.peer.machine.events import QUIET, Event
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.port import own_port
from gossamer.peer.supervisor.child_process import ChildExit, ChildProcess
from gossamer.peer.supervisor.condition import Condition
from gossamer.peer.supervisor.guest import GuestProcess
from gossamer.protocol.errors import ExitCode, GossamerError
from gossamer.protocol.tasks import Changes, cancel, work_until

PROGRAMS = {NODE: "gossamer.peer.node", TRAINER: "gossamer.peer.trainer"}  # python -m
RESTART_PAUSE_S = (1.0, 30.0)  # first and longest pause before a child is started again
PAUSE_GROWTH, MAX_GROWTHS = 4, 8  # each pause is so many times the last one; failures of days make no number too large for a float
MAX_FAILURES = 3  # of one child in a row; then another restart would hide the cause
HEALTHY_S = 600.0  # after a run of this length the count of failures starts again
LEAVE_S = {NODE: 5.0, TRAINER: 4.0}  # to end meetings, then to save small files, before they are killed
SAVES = 3  # grace for the trainer, in durations of its last checkpoint: the one in progress, the final one, and a reserve
BYTES_PER_PARAM, SLOW_DISK_BYTES_PER_S = 16, 1e8  # for an estimate before the first checkpoint
RESTARTED: Mapping[str, Callable[[str, int], Event]] = {NODE: events.NodeRestarted, TRAINER: events.TrainerRestarted}
LAST_WORK = {NODE: "ending meetings", TRAINER: "saving"}  # in this order
LAST_MEETINGS_S = 600.0  # before a pause, for meetings in progress to end
LAST_SAVE_S = 300.0  # before a pause, for the trainer to save
OUT_OF_MEMORY = "the system ran out of memory and killed it: free memory, or give the container more"
NEVER_AGAIN = {ExitCode.REFUSED_BY_RUN, ExitCode.VERSION_MISMATCH}  # exit codes of the node that end the peer even while it trains

Process = ChildProcess | GuestProcess


class ChildFailed(GossamerError):
    """A child process ended with an error that a restart cannot correct; the exit code is the child's."""

    def __init__(self, message: str, *, hint: str, exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = ExitCode(exit_code) if exit_code in set(ExitCode) else ExitCode.OUR_FAULT


class Children:
    """The child processes of a peer: `keep` them running, have them `follow` settings and pauses, `stop` them. Belongs to one event loop.

    They follow `condition.pause`, and note in `condition` how they are; `describe` is called after each such note. `emit` gets each event
    of theirs and about them. Of these, a ProcessFailed says that the trainer cannot start with its present settings: the peer must pause.
    `guest` trains, if it is given, in place of a trainer process.
    """

    def __init__(
        self,
        config: PeerConfig,
        peer_id: str,
        condition: Condition,
        emit: Callable[[Event], None],
        describe: Callable[[], None],
        programs: Mapping[str, str] = PROGRAMS,
        guest: GuestProcess | None = None,
    ) -> None:
        self._config, self._peer_id, self._condition = config, peer_id, condition
        self._emit, self._describe = emit, describe
        self._programs, self._guest = programs, guest
        self._home = Home(config.home)
        self._processes: dict[str, Process] = {}  # that were started, by name
        self._awake: set[str] = set()  # those that have their settings
        self._away: set[str] = set()  # those that were stopped for a pause or for other settings
        self._restarting: set[str] = set()  # those whose settings have changed
        self._is_quiet = False  # the node has reported that no meeting is in progress
        self._is_run_known = self._home.manifest.exists()
        self._save_s = 0.0  # duration of the last checkpoint, or its estimate
        self._last_port = 0  # of the node
        self._changes = Changes()

    def pid(self, name: str) -> int:
        """Return a child's process id, for benchmarks and diagnosis. Raises KeyError before its first start."""
        return self._processes[name].pid or 0

    def is_awake(self, name: str) -> bool:
        """Return whether a child runs and has its settings."""
        return name in self._awake

    async def keep(self, runtime: Path) -> str:
        """Start them, and start again what dies or was stopped, until the peer ends; return why it leaves: empty if the run is over.

        Raises ChildFailed when a restart would not help. However it ends, those that run go on until `stop`.
        """
        self._runtime = runtime
        work = [asyncio.create_task(self._keep(name)) for name in self._config.children]
        try:
            running = {*work}
            while not work[0].done():
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what ended it
            return work[0].result()
        finally:
            await cancel(*work)

    def follow(self, config: PeerConfig, *restarts: str) -> None:
        """Follow these settings and the pause of now; those of `restarts` that run end their work and start again."""
        self._config = config
        self._restarting |= set(filter(self._can_restart, restarts))
        self._send_settings()
        self._changes.notify()

    def publish(self, part: OwnPart) -> None:
        """Send the node what it publishes about this peer's part in the run."""
        self._notify(NODE, self._settings().model_copy(update={"part": part}))

    async def stop(self, begin: Callable[[str], None]) -> ChildExit | None:
        """Stop the node, which ends its meetings, then the trainer, which saves; return how that ended, None if it was killed or never ran.

        `begin` is called before each with its last work, in words. Call it after `keep`.
        """
        exits: dict[str, ChildExit | None] = {}
        for name, last_work in LAST_WORK.items():
            if name in self._processes:
                begin(last_work)
                exits[name] = await self._processes[name].stop(self._grace_s(name))
                if name == NODE and NODE in self._awake:
                    self._emit(events.NodeStopped())
        return exits.get(TRAINER)

    def kill(self) -> None:
        """Kill those that run."""
        for child in self._processes.values():
            child.kill()

    def _grace_s(self, name: str) -> float:
        """Return how long a child may take to end."""
        if name == NODE:
            return LEAVE_S[NODE]
        return LAST_SAVE_S if self._guest is not None else LEAVE_S[TRAINER] + SAVES * self._save_s  # a guest may be in a long step

    # ------------------------------------------------------------------ starts and restarts

    async def _keep(self, name: str) -> str:
        """Keep one child running until it ends in order, or the peer leaves because of it; return as `keep` does. Raises ChildFailed."""
        failures = 0
        while True:
            await self._changes.until(lambda: self._may_run(name) or self._has_finished(name))
            if self._has_finished(name):
                return "asked to leave, and finished"
            child = self._processes[name] = await self._started(name)
            if name == TRAINER:
                await self._changes.until(lambda: self._is_run_known)
            started_s, was_away, given = time.monotonic(), name in self._away, self._config
            child.notify(self._settings().to_line())
            self._note_running(name)
            exit = await self._until_sent_away(name, child)
            self._awake.discard(name)
            self._changes.notify()
            if name == NODE:
                self._emit(events.NodeStopped())
            if exit is None:
                continue
            if child is self._guest and not self._guest.has_finished:
                if exit.failure is not None:
                    raise ChildFailed(exit.failure.error, hint=exit.failure.hint, exit_code=exit.failure.exit_code)
                return exit.reason
            if exit.code == 0:
                return ""
            if name == TRAINER and was_away and not self._condition.trains and exit.failure is not None and exit.failure.final:
                self._away.add(name)
                if given == self._config:  # else the operator has changed meanwhile what it complains of
                    self._emit(exit.failure)
                continue
            failures = 1 if time.monotonic() - started_s > HEALTHY_S else failures + 1
            self._give_up(name, exit, failures)
            await self._back_off(name, exit, failures)

    async def _started(self, name: str) -> Process:
        def on_event(event: Event) -> None:
            self._take(name, event)

        if name == TRAINER and self._guest is not None:
            self._guest.on_event = on_event
            return self._guest
        child = ChildProcess(self._programs[name], self._home.log, on_event)
        await child.start(self._config.niceness)
        return child

    def _settings(self) -> ChildSettings:
        config, home = self._config, self._home
        waits_for_start = not config.alone and (home.invite.exists() or config.wait_for_peers > 0 or home.stage.exists())
        resting = self._condition.pause is not None or bool(self._restarting)
        return ChildSettings(
            config=config, peer_id=self._peer_id, runtime=self._runtime, waits_for_start=waits_for_start, paused=resting,
            last_port=self._last_port,
        )  # fmt: skip

    def _note_running(self, name: str) -> None:
        """Record that a child has its settings and runs."""
        self._awake.add(name)
        if name in self._away:
            self._away.discard(name)
            self._emit(RESTARTED[name]("stopped because of a settings change or a pause", 0))
        if name in self._restarting:
            self._restarting.discard(name)
            self._send_settings()

    def _give_up(self, name: str, exit: ChildExit, failures: int) -> None:
        """Raise ChildFailed if a restart would not help. Failures of the node rarely end a peer whose trainer trains."""
        has_trained = self._condition.has_trained
        if exit.code == ExitCode.SWARM_UNREACHABLE and (self._config.keep_trying or (name == TRAINER and has_trained)):
            return  # the network may come back: of a trainer, to the host of its data set
        trains_on = name == NODE and has_trained
        if exit.failure is not None and exit.failure.final and not (trains_on and exit.code not in NEVER_AGAIN):
            raise ChildFailed(exit.failure.error, hint=exit.failure.hint, exit_code=exit.failure.exit_code)
        if failures >= MAX_FAILURES and not trains_on:
            hint = OUT_OF_MEMORY if exit.code == -signal.SIGKILL else getattr(exit.failure, "hint", "") or f"see {self._home.log}"
            raise ChildFailed(f"the {name} failed {failures} times in a row: {exit.reason}", hint=hint, exit_code=exit.code)

    async def _back_off(self, name: str, exit: ChildExit, failures: int) -> None:
        pause_s = min(RESTART_PAUSE_S[1], RESTART_PAUSE_S[0] * PAUSE_GROWTH ** min(failures - 1, MAX_GROWTHS))
        self._emit(RESTARTED[name](exit.reason, failures))
        self._condition.note_exit(name, exit.reason, pause_s)
        self._describe()
        await asyncio.sleep(pause_s)

    def _take(self, name: str, event: Event) -> None:
        """Take in an event of a child."""
        match event:
            case events.StageMoved():
                self.follow(self._config, NODE, TRAINER)
            case events.ModelBuilt():
                self._save_s = self._save_s or event.params * BYTES_PER_PARAM / SLOW_DISK_BYTES_PER_S
            case events.CheckpointSaved():
                self._save_s = event.seconds
            case events.RunKnown():
                self._is_run_known = True
            case events.AddressesChanged():
                self._last_port = own_port(self._config, event.addresses) or self._last_port
        if isinstance(event, events.ProcessReported) and event.state == QUIET:
            self._is_quiet = True
        else:
            self._condition.take_event(name, event, time.monotonic())
        self._emit(event)
        self._changes.notify()
        self._describe()

    # ------------------------------------------------------------------ pauses and other settings

    def _send_settings(self) -> None:
        """Send the node, and a program that started us, the current settings, and whether to pause."""
        self._is_quiet = False
        for name in (NODE, TRAINER) if self._guest is not None else (NODE,):
            self._notify(name, self._settings())

    def _notify(self, name: str, settings: ChildSettings) -> None:
        """Send a child other settings; not its first ones, which say that there is a run."""
        if name in self._awake and self._processes[name].is_running:
            self._processes[name].notify(settings.to_line())

    def _can_restart(self, name: str) -> bool:
        return name in self._processes and name not in self._away and (name == NODE or self._guest is None)

    def _may_run(self, name: str) -> bool:
        pause = self._condition.pause
        if name == TRAINER and self._guest is not None:
            return pause is None or not pause.is_last  # it pauses by itself
        return pause is None or (name == NODE and not pause.is_offline)

    def _has_finished(self, name: str) -> bool:
        """Return whether the peer leaves as soon as this child, which does not run, has ended its work."""
        return name == TRAINER and self._condition.pause is not None and self._condition.pause.is_last

    def _must_go(self, name: str) -> bool:
        return name in self._restarting or not self._may_run(name)

    async def _until_sent_away(self, name: str, child: Process) -> ChildExit | None:
        """Wait for the end of a child; None if it was stopped here and has ended its work."""
        if (exit := await work_until(child.wait(), self._until_to_go(name))) is not None:
            return exit
        await child.stop(LAST_SAVE_S)
        self._away.add(name)
        self._condition.note_stop(name)
        self._describe()
        return None

    async def _until_to_go(self, name: str) -> None:
        """Wait until a child must stop and no meeting is in progress. A pause may end before the meeting does."""
        while True:
            await self._changes.until(lambda: self._must_go(name))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_MEETINGS_S):
                    await self._changes.until(lambda: self._is_quiet or NODE not in self._awake or not self._must_go(name))
            await self._changes.until(lambda: name != NODE or TRAINER not in self._awake or self._may_run(TRAINER))
            if self._must_go(name):
                return
