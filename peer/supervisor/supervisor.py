"""The supervisor: starts the node and the trainer of one peer, restarts what dies, answers the control socket, and stops both cleanly.

Events of the children and its own are folded into the status and written to the home folder; no other process writes there.

It imports neither torch nor hivemind. It holds the home's lock and owns the runtime folder, so a failed child leaves nothing behind. The
children end with it (peer/machine/child.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gossamer.peer.machine import events
from gossamer.peer.machine.child import ChildSettings, OwnPart
from gossamer.peer.machine.config import NODE, TRAINER, LocalSettings, PeerConfig, peer_config, save_settings, saved_settings, with_setting
from gossamer.peer.machine.event_log import EventLog
from gossamer.peer.machine.events import QUIET, Event
from gossamer.peer.machine.export_text import export_text
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.runtime_folder import PAYLOAD_BYTES, runtime_folder
from gossamer.peer.machine.states import START_AGAIN, changed
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.supervisor.child_process import ChildExit, ChildProcess
from gossamer.peer.supervisor.condition import Condition
from gossamer.peer.supervisor.guest import GuestProcess
from gossamer.peer.supervisor.housekeeping import Housekeeping, earlier
from gossamer.peer.supervisor.notices import Notices
from gossamer.peer.supervisor.pauses import LAST_PAUSE, Pauses, refused_pause
from gossamer.peer.supervisor.run_watch import RunWatch
from gossamer.peer.supervisor.runtime_watch import RuntimeWatch
from gossamer.protocol.errors import BadSettings, ExitCode, GossamerError, classified
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest
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
ASKED = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "its terminal was closed"}  # to leave
LOOK_S = 1.0  # between two checks for a silent trainer and for pauses that the settings require
LAST_MEETINGS_S = 600.0  # before a pause, for meetings in progress to end
LAST_SAVE_S = 300.0  # before a pause, for the trainer to save
OUT_OF_MEMORY = "the system ran out of memory and killed it: free memory, or give the container more"
NEVER_AGAIN = {ExitCode.REFUSED_BY_RUN, ExitCode.VERSION_MISMATCH}  # exit codes of the node that end the peer even while it trains

Watch = Callable[[Status], None]


class ChildFailed(GossamerError):
    """A child process ended with an error that a restart cannot correct; the exit code is the child's."""

    def __init__(self, message: str, *, hint: str, exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = ExitCode(exit_code) if exit_code in set(ExitCode) else ExitCode.OUR_FAULT


async def run_peer(
    config: PeerConfig,
    identity: Identity,
    manifest: SignedManifest | None,
    invite: Invite | None,
    watch: Watch,
    guest: GuestProcess | None = None,
) -> Status:
    """Run one peer until its run ends, it is asked to leave, or it cannot continue. Its home folder exists (`Home.create`).

    A manifest makes it the run's host, an invite a member; with neither, it continues the run in its home folder. A new run that
    fails before it has trained or issued an invite leaves no manifest: only the children, which load torch, can detect an impossible
    codec or model, and the corrected command must find the home free. `watch` is called with the live status after every change, on
    the event loop. `guest` trains, if it is given, in place of a trainer process. Returns the last status. Raises GossamerError;
    KeyboardInterrupt after Ctrl-C.
    """
    home = Home(config.home)
    with home.locked(), runtime_folder(PAYLOAD_BYTES if config.trains else 0, home.path) as runtime:
        is_new = manifest is not None and not home.manifest.exists()
        if manifest is not None:
            write_whole(home.manifest, manifest.to_bytes())
        if invite is not None:
            write_whole(home.invite, invite.to_text().encode() + b"\n")  # it is a secret
        supervisor = Supervisor(config, str(identity.peer_id), watch, guest=guest)
        try:
            await supervisor.run(runtime)
        except GossamerError:
            if is_new and not supervisor.condition.has_trained and not home.invites.exists():
                home.manifest.unlink(missing_ok=True)
            raise
        if supervisor.interrupted:
            raise KeyboardInterrupt
        return supervisor.status


class Supervisor:
    """One peer on this machine. Make one, `run` it once."""

    def __init__(
        self, config: PeerConfig, peer_id: str, watch: Watch, programs: Mapping[str, str] = PROGRAMS, guest: GuestProcess | None = None
    ) -> None:
        self.status = Status()
        self._save_s = 0.0  # duration of the last checkpoint
        self.interrupted = False  # by Ctrl-C
        self._config = config
        self._peer_id = peer_id
        self._home = Home(config.home)
        self._watch = watch
        self._programs = programs
        self._guest = guest
        self._log = EventLog(self._home.events)
        self.condition = Condition(config.children)
        self._logged = ("", "")
        self._run_watch = RunWatch(self._home)
        self._housekeeping = Housekeeping(self._home)
        self._notices = Notices(self._note)
        self._leave_reason = ""  # empty until the peer is asked to leave
        self._children: dict[str, ChildProcess | GuestProcess] = {}
        self._pauses = Pauses(self._home)
        self._restarting: set[str] = set()  # children whose settings have changed
        self._awake: set[str] = set()  # children that have their settings
        self._away: set[str] = set()  # children that were stopped for a pause or for other settings
        self._is_quiet = False  # the node has reported that no meeting is in progress
        self._changes = Changes()

    async def run(self, runtime: Path) -> None:
        """Run the peer until its run ends or it is asked to leave. Raises GossamerError when it cannot continue."""
        self._runtime = runtime
        self._note(events.PeerStarted(self._peer_id, earlier(self._home)))
        self._note(events.LimitsSet(self._config.limits_in_force))
        self._note(events.MonthCounted(self._pauses.month.num_bytes))
        self.condition.pause = self._pauses.current_pause(self._config)
        self._describe()
        self._runtime_watch = RuntimeWatch(self._home, runtime, self._answer, self._note)
        async with self._runtime_watch.open():
            for number in ASKED:
                if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                    asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)  # until the loop is closed
            looking = asyncio.create_task(self._look_regularly())
            work = [asyncio.create_task(self._keep(name)) for name in self._config.children]
            try:
                await self._until_over([*work, looking])
            finally:
                await self._stop(work, looking)
                self._pauses.close()
                self._housekeeping.keep(self.status)
                self._run_watch.keep()
                self._notices.look(self.status, self.condition.pause, self._config.notify)
                await self._notices.close()

    async def _until_over(self, work: list[asyncio.Task[None]]) -> None:
        for task in work:
            task.add_done_callback(lambda _: self._changes.notify())
        await self._changes.until(
            lambda: bool(self._leave_reason) or work[0].done() or any(task.done() and task.exception() for task in work)
        )
        try:
            for task in filter(asyncio.Task.done, work):
                task.result()  # raises what ended it
        except Exception as error:
            shown = classified(error, f"see {self._home.log}")
            self._set_final_state("failed", str(shown), shown.hint)
            raise

    async def _stop(self, work: list[asyncio.Task[None]], looking: asyncio.Task[None]) -> None:
        """Stop the node, which ends its meetings, then the trainer, which saves."""
        is_leaving = not work[0].done() and self.condition.ending is None
        if work[0].done() and self.condition.ending is None:
            self._set_final_state("done", "the run is over", export_text(is_staged=bool(self.status.stage)))
        self._pauses.month.save(time.time())
        await cancel(*work, looking)  # no more restarts
        exits = {}
        for name, last_work in LAST_WORK.items():
            if name not in self._children:
                continue
            if is_leaving:
                self._set_final_state("leaving", f"{self._leave_reason}: {last_work}")
            exits[name] = await self._children[name].stop(self._grace_s(name))
            if name == NODE and self.status.addresses:
                self._note(events.NodeStopped())
        if is_leaving:
            self._set_final_state("left", self._final_reason(exits.get(TRAINER)), START_AGAIN if self._guest is not None else "")

    def _grace_s(self, name: str) -> float:
        """Return how long a child may take to end."""
        if name == NODE:
            return LEAVE_S[NODE]
        if self._guest is not None:
            return LAST_SAVE_S  # it may be in the middle of a long step
        save_s = self._save_s or self.status.params * BYTES_PER_PARAM / SLOW_DISK_BYTES_PER_S
        return LEAVE_S[TRAINER] + SAVES * save_s

    def _final_reason(self, trainer: ChildExit | None) -> str:
        if not self._config.trains:
            return self._leave_reason
        if self._guest is not None and trainer is not None:
            return trainer.reason
        if not self.condition.has_trained:
            return "stopped before training began"
        if trainer is not None and trainer.code == 0:
            return "saved and stopped"
        why = "did not save in time" if self.condition.trains else "had not started again"
        return f"stopped; the trainer {why}, so the last checkpoint is the newest state"

    def pid(self, name: str) -> int:
        """Return a child's process id, for benchmarks and diagnosis. Raises KeyError before its first start."""
        return self._children[name].pid or 0

    async def _keep(self, name: str) -> None:
        """Restart a child whenever it ends early or was stopped. Returns when it has ended in order; raises ChildFailed."""
        failures = 0
        while True:
            await self._changes.until(lambda: self._may_run(name))
            child = self._children[name] = await self._started(name)
            if name == TRAINER:
                await self._changes.until(lambda: bool(self.status.run_id) or self._home.manifest.exists())
            started_s, was_away = time.monotonic(), name in self._away
            child.notify(self._settings().to_line())
            self._note_running(name)
            exit = await self._until_sent_away(name, child)
            if name == NODE:
                self._note(events.NodeStopped())
            if exit is None:
                self._pauses.month.save(time.time())
                if self._pauses.asked is not None and self._pauses.asked.is_last:
                    self.leave("asked to leave, and finished")
                continue
            self._awake.discard(name)
            self._changes.notify()
            if child is self._guest and not self._guest.has_finished:
                await self._let_guest_go(exit)
            if exit.code == 0:
                return
            if name == TRAINER and was_away and not self.condition.trains and exit.failure is not None and exit.failure.final:
                self._pauses.asked = refused_pause(exit.failure.error, exit.failure.hint)
                self._away.add(name)
                self._update_pause()
                continue
            failures = 1 if time.monotonic() - started_s > HEALTHY_S else failures + 1
            self._give_up(name, exit, failures)
            await self._back_off(name, exit, failures)

    async def _started(self, name: str) -> ChildProcess | GuestProcess:
        if name == TRAINER and self._guest is not None:
            self._guest.on_event = partial(self._on_event, name)
            return self._guest
        child = ChildProcess(self._programs[name], self._home.log, partial(self._on_event, name))
        await child.start(self._config.niceness)
        return child

    async def _let_guest_go(self, exit: ChildExit) -> None:
        """Leave the run with a program that has ended before it. Raises ChildFailed with its error."""
        if exit.failure is not None:
            raise ChildFailed(exit.failure.error, hint=exit.failure.hint, exit_code=exit.failure.exit_code)
        self.leave(exit.reason)
        await asyncio.Future()  # the peer ends meanwhile

    def _settings(self) -> ChildSettings:
        config = self._config
        waits_for_start = not config.alone and (self._home.invite.exists() or config.wait_for_peers > 0 or self._home.stage.exists())
        resting = self.condition.pause is not None or bool(self._restarting)
        return ChildSettings(config=config, peer_id=self._peer_id, runtime=self._runtime, waits_for_start=waits_for_start, paused=resting)

    def _give_up(self, name: str, exit: ChildExit, failures: int) -> None:
        """Raise ChildFailed if a restart would not help. Failures of the node rarely end a peer whose trainer trains."""
        if exit.code == ExitCode.SWARM_UNREACHABLE and (self._config.keep_trying or (name == TRAINER and self.condition.has_trained)):
            return  # the network may come back: of a trainer, to the host of its data set
        trains_on = name == NODE and self.condition.has_trained
        if exit.failure is not None and exit.failure.final and not (trains_on and exit.code not in NEVER_AGAIN):
            raise ChildFailed(exit.failure.error, hint=exit.failure.hint, exit_code=exit.failure.exit_code)
        if failures >= MAX_FAILURES and not trains_on:
            hint = OUT_OF_MEMORY if exit.code == -signal.SIGKILL else getattr(exit.failure, "hint", "") or f"see {self._home.log}"
            raise ChildFailed(f"the {name} failed {failures} times in a row: {exit.reason}", hint=hint, exit_code=exit.code)

    async def _back_off(self, name: str, exit: ChildExit, failures: int) -> None:
        pause_s = min(RESTART_PAUSE_S[1], RESTART_PAUSE_S[0] * PAUSE_GROWTH ** min(failures - 1, MAX_GROWTHS))
        self._note(RESTARTED[name](exit.reason, failures))
        self.condition.note_exit(name, exit.reason, pause_s)
        self._describe()
        await asyncio.sleep(pause_s)

    # ------------------------------------------------------------------ pauses

    def _update_pause(self) -> None:
        """Start or end a pause, as the operator or the settings require."""
        before, rest = self.condition.pause, self._pauses.current_pause(self._config)
        if rest != before:
            self.condition.pause = rest
            if (rest is None) != (before is None):
                self._send_settings()
            self._changes.notify()
            self._describe()

    def _send_settings(self) -> None:
        """Send the node, and a program that started us, the current settings, and whether to pause."""
        self._is_quiet = False
        for child in (self._children.get(NODE), self._guest):
            if child is not None and child.is_running:
                child.notify(self._settings().to_line())

    def _restart(self, *names: str) -> None:
        """Have those of these children that run end their work and start again."""
        self._restarting |= set(filter(self._can_restart, names))
        self._send_settings()
        self._changes.notify()

    def _may_run(self, name: str) -> bool:
        rest = self.condition.pause
        if name == TRAINER and self._guest is not None:
            return rest is None or not rest.is_last  # it pauses by itself
        return rest is None or (name == NODE and not rest.is_offline)

    def _must_go(self, name: str) -> bool:
        return name in self._restarting or not self._may_run(name)

    async def _until_sent_away(self, name: str, child: ChildProcess | GuestProcess) -> ChildExit | None:
        """Wait for the end of a child; None if the supervisor stopped it and it has ended its work."""
        if (exit := await work_until(child.wait(), self._until_to_go(name))) is not None:
            return exit
        await child.stop(LAST_SAVE_S)
        self._awake.discard(name)
        self._away.add(name)
        self.condition.note_stop(name)
        self._changes.notify()
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

    def _note_running(self, name: str) -> None:
        """Record that a child has its settings and runs."""
        self._awake.add(name)
        if name in self._away:
            self._note(RESTARTED[name]("stopped because of a settings change or a pause", 0))
            self._away.discard(name)
        if name in self._restarting:
            self._restarting.discard(name)
            self._send_settings()

    # ------------------------------------------------------------------ events and requests

    def _on_event(self, name: str, event: Event) -> None:
        self._run_watch.take(event)
        if name == NODE and isinstance(event, events.ProcessReported) and event.state == QUIET:
            self._is_quiet = True
            self._changes.notify()
        elif isinstance(event, events.StageMoved):
            self._restart(NODE, TRAINER)
        elif isinstance(event, events.TrafficCounted):
            self._note(events.MonthCounted(self._pauses.month.count(event.sent_bytes + event.received_bytes, time.time())))
        else:
            self.condition.take_event(name, event, time.monotonic())
        if isinstance(event, events.CheckpointSaved):
            self._save_s = event.seconds
        self._note(event)
        if isinstance(event, events.RunKnown):
            self._changes.notify()
        self._describe()

    def _note(self, event: Event) -> None:
        self.status = apply(self.status, event)
        if not isinstance(event, events.Report):
            self._log.append(event)

    async def _look_regularly(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._update_pause()
            if await self._runtime_watch.look():
                self._restart(NODE)  # its sockets are gone too; the trainer makes its own again
            for event in (*self._housekeeping.look(self.status), *self._pauses.look(self.status)):
                self._note(event)
                self._run_watch.take(event)
            self._publish(self._run_watch.look(time.time(), self.status))
            self._describe()
            self._notices.look(self.status, self.condition.pause, self._config.notify)

    def _publish(self, part: OwnPart | None) -> None:
        """Send the node what it publishes about this peer's part in the run."""
        node = self._children.get(NODE)
        if part is not None and node is not None and NODE in self._awake and node.is_running:
            node.notify(self._settings().model_copy(update={"part": part}).to_line())

    def _set_final_state(self, state: str, reason: str, way_out: str = "") -> None:
        self.condition.ending = changed(state, reason, way_out)
        self._describe()

    def _describe(self) -> None:
        """Update the state of the status and notify the watcher."""
        event = self.condition.describe(self.status.peers_seen, time.monotonic())
        self.status = apply(self.status, event)
        wording = (event.state, re.sub(r"[0-9]+", "#", event.reason))  # a percentage that grows is no news
        if wording != self._logged:
            self._logged = wording
            self._log.append(event)
        with contextlib.suppress(OSError):  # the terminal or pipe that we draw on was closed: no reason to stop
            self._watch(self.status)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"verb": "status"}:
                return self.status.to_json()
            case {"verb": "health"}:
                return {"trouble": self.condition.trouble(time.monotonic())}
            case {"verb": "peers"}:
                return {"peers": [asdict(partner) for partner in self.status.partners.values()]}
            case {"verb": "history"}:
                return self.status.history.to_json()
            case {"verb": "run"}:
                return self._run_watch.shown()
            case {"verb": "leave"}:
                self._leave(finish=bool(request.get("finish")))
                return {"leaving": True}
            case {"verb": "pause"}:
                return self._pause(request.get("seconds"))
            case {"verb": "resume"}:
                return self._resume()
            case {"verb": "config"}:
                return self._config.model_dump(mode="json", include=set(LocalSettings.model_fields))
            case {"verb": "set", "key": str(key), "value": str() | None as value}:
                return self._set(key, value)
            case _:
                return {"error": f"there is no verb {request.get('verb')!r}"}

    def _pause(self, seconds: object) -> dict[str, Any]:
        if not self._config.trains:
            raise BadSettings("a bootstrap node does not train, so there is nothing to pause", hint="`peer leave` stops it")
        self._pauses.ask(seconds)
        self._update_pause()
        return {"state": self.status.state, "reason": self.status.reason}

    def _leave(self, *, finish: bool) -> None:
        if not finish or TRAINER not in self._awake:
            self.leave("asked to leave")
            return
        self._pauses.asked = LAST_PAUSE
        self._update_pause()

    def _resume(self) -> dict[str, Any]:
        was_paused, self._pauses.asked = self.condition.pause is not None, None
        self._update_pause()
        if (rest := self.condition.pause) is not None:
            raise BadSettings(f"it stays paused: {rest.reason}", hint=rest.way_out)
        return {"state": self.status.state, "reason": self.status.reason, "was_paused": was_paused}

    def _set(self, key: str, text: str | None) -> dict[str, Any]:
        """Change a setting in `config.toml` and in this peer. Raises BadSettings with nothing changed."""
        given = with_setting(saved_settings(self._home), key, text)
        value = given.get(key, LocalSettings.model_fields[key].get_default())
        config = peer_config(self._config.model_dump() | {key: value})
        save_settings(self._home, given)
        if config == self._config:
            return {"value": value}
        self._config = config
        self._note(events.LimitsSet(config.limits_in_force))
        self._update_pause()
        self._restart(*LocalSettings.setting(key).restarts)
        if key == "notify":
            self._notices.test(self.status, config.notify)
        return {"value": value}

    def _can_restart(self, name: str) -> bool:
        return name in self._children and name not in self._away and (name == NODE or self._guest is None)

    def leave(self, reason: str) -> None:
        """Finish or drop the current meetings, save, announce, and end."""
        self._leave_reason = self._leave_reason or reason
        self._changes.notify()

    def _on_signal(self, number: signal.Signals) -> None:
        """Leave cleanly on the first; a second one does not wait for meetings and checkpoints."""
        if self._leave_reason:
            self.interrupted = True
            for child in self._children.values():
                child.kill()
        self.interrupted |= number == signal.SIGINT
        self.leave(ASKED[number])
