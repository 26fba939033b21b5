"""The supervisor of one peer: has its children run (children.py), decides when it pauses, answers the control socket, and ends it cleanly.

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
from pathlib import Path
from typing import Any

from gossamer.peer.machine import events
from gossamer.peer.machine.config import NODE, TRAINER, LocalSettings, PeerConfig, peer_config, save_settings, saved_settings, with_setting
from gossamer.peer.machine.event_log import EventLog
from gossamer.peer.machine.events import Event
from gossamer.peer.machine.export_text import export_text
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.runtime_folder import PAYLOAD_BYTES, runtime_folder
from gossamer.peer.machine.states import START_AGAIN, changed
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.supervisor.child_process import ChildExit
from gossamer.peer.supervisor.children import PROGRAMS, Children
from gossamer.peer.supervisor.clock_watch import ClockWatch
from gossamer.peer.supervisor.condition import Condition
from gossamer.peer.supervisor.guest import GuestProcess
from gossamer.peer.supervisor.housekeeping import Housekeeping, earlier
from gossamer.peer.supervisor.notices import Notices
from gossamer.peer.supervisor.pauses import LAST_PAUSE, Pauses, refused_pause
from gossamer.peer.supervisor.run_watch import RunWatch
from gossamer.peer.supervisor.runtime_watch import RuntimeWatch
from gossamer.protocol.errors import BadSettings, GossamerError, classified
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest
from gossamer.protocol.tasks import Changes, cancel

ASKED = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "its terminal was closed"}  # to leave
LOOK_S = 1.0  # between two looks at the clock, at what the settings require, and at what is due

Watch = Callable[[Status], None]


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
        self.interrupted = False  # by Ctrl-C
        self.condition = Condition(config.children)
        self.children = Children(config, peer_id, self.condition, self._take, self._describe, programs, guest)
        self._config = config
        self._peer_id = peer_id
        self._home = Home(config.home)
        self._watch = watch
        self._guest = guest
        self._log = EventLog(self._home.events)
        self._logged = ("", "")
        self._clock = ClockWatch()
        self._run_watch = RunWatch(self._home)
        self._pauses = Pauses(self._home)
        self._housekeeping = Housekeeping(self._home, self._records)
        self._notices = Notices(self._note)
        self._leave_reason = ""  # empty until the peer is asked to leave
        self._changes = Changes()

    async def run(self, runtime: Path) -> None:
        """Run the peer until its run ends or it is asked to leave. Raises GossamerError when it cannot continue."""
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
            keeping, looking = asyncio.create_task(self.children.keep(runtime)), asyncio.create_task(self._look_regularly())
            try:
                await self._until_over(keeping, looking)
            finally:
                await cancel(keeping, looking)  # no more restarts
                await self._stop()
                self._pauses.close()
                self._housekeeping.keep()
                self._notices.look(self.status, self.condition.pause, self._config.notify)
                await self._notices.close()

    async def _until_over(self, keeping: asyncio.Task[str], looking: asyncio.Task[None]) -> None:
        for task in (keeping, looking):
            task.add_done_callback(lambda _: self._changes.notify())
        await self._changes.until(lambda: bool(self._leave_reason) or keeping.done() or looking.done())
        try:
            if looking.done():
                looking.result()  # raises what ended it
            if keeping.done():
                if reason := keeping.result():
                    self.leave(reason)
                else:
                    self._set_final_state("done", "the run is over", export_text(is_staged=bool(self.status.stage)))
        except Exception as error:
            shown = classified(error, f"see {self._home.log}")
            self._set_final_state("failed", str(shown), shown.hint)
            raise

    async def _stop(self) -> None:
        is_leaving = self.condition.ending is None

        def begin(last_work: str) -> None:
            if is_leaving:
                self._set_final_state("leaving", f"{self._leave_reason}: {last_work}")

        trainer = await self.children.stop(begin)
        if is_leaving:
            self._set_final_state("left", self._final_reason(trainer), START_AGAIN if self._guest is not None else "")

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

    # ------------------------------------------------------------------ events and the regular look

    def _take(self, event: Event) -> None:
        """Fold an event of a child into what is kept."""
        self._run_watch.take(event)
        match event:
            case events.TrafficCounted():
                self._note(events.MonthCounted(self._pauses.month.count(event.sent_bytes + event.received_bytes, time.time())))
            case events.ProcessFailed():
                self._pauses.asked = refused_pause(event.error, event.hint)
                self._update_pause()
        self._note(event)

    def _note(self, event: Event) -> None:
        self.status = apply(self.status, event)
        if not isinstance(event, events.Report):
            self._log.append(event)

    async def _look_regularly(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._follow_clock()
            self._update_pause()
            if await self._runtime_watch.look():
                self.children.follow(self._config, NODE)  # its sockets are gone too; the trainer makes its own again
            for event in (*self._housekeeping.look(self.status), *self._pauses.look(self.status)):
                self._note(event)
            if (part := self._run_watch.look(time.time(), self.status)) is not None:
                self.children.publish(part)
            self._describe()
            self._notices.look(self.status, self.condition.pause, self._config.notify)

    def _follow_clock(self) -> None:
        """Move all times that are kept here, if the machine's clock was set since the last call."""
        if (clock_set := self._clock.look()) is not None:
            self._note(clock_set)
            self._run_watch.take(clock_set)
            self._pauses.move(clock_set.seconds)

    def _records(self) -> dict[Path, object]:
        """Return what the next start, or a command after the end of this one, reads from the home; by file."""
        home = self._home
        return {home.status: self.status.to_json(), home.run: self._run_watch.record(), home.traffic: self._pauses.month.record()}

    def _update_pause(self) -> None:
        """Start or end a pause, as the operator or the settings require."""
        before, self.condition.pause = self.condition.pause, self._pauses.current_pause(self._config)
        if self.condition.pause != before:
            self.children.follow(self._config)
            self._describe()

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

    # ------------------------------------------------------------------ requests

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self._follow_clock()
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
        if not finish or not self.children.is_awake(TRAINER):
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
        self.children.follow(config, *LocalSettings.setting(key).restarts)
        if key == "notify":
            self._notices.test(self.status, config.notify)
        return {"value": value}

    def leave(self, reason: str) -> None:
        """Finish or drop the current meetings, save, announce, and end."""
        self._leave_reason = self._leave_reason or reason
        self._changes.notify()

    def _on_signal(self, number: signal.Signals) -> None:
        """Leave cleanly on the first; a second one does not wait for meetings and checkpoints."""
        if self._leave_reason:
            self.interrupted = True
            self.children.kill()
        self.interrupted |= number == signal.SIGINT
        self.leave(ASKED[number])
