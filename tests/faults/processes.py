"""Real peers on this machine: one process after another is killed at a random moment, and the disks are checked each time."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from gossamer.cli.local_swarm import LocalSwarm, local_swarm
from gossamer.peer.machine.events import MeetingDone, StepDone, from_line
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import has_stepped
from tests.peer.family import everybody, family, gone
from tests.peer.waiting import wait_until

KILLS = 20  # per trial
JOINERS = 2
BACK_S = 120.0  # limit of a recovery: the machine is busy, and a process imports torch first
HOLDERS_KILLS = 4  # per trial of a staged run
HOLDERS = 4  # of two stages
IDLE_S = 15.0  # at most, of other holders for one
PARTS = ("trainer", "node", "peer")
MOST = 2  # kills of one child per start of a peer: the supervisor gives up after the third
LOCAL = ("--listen", "127.0.0.1", "--threads", "1", "--devices", "cpu", "--checkpoint-every", "2")
MANIFEST = """
[run]
total_steps = 1000000
[outer]
inner_steps = 8
deadline_s = 5.0
"""
STAGED = (
    MANIFEST
    + """
[stages]
count = 2
"""
)


class Victim:
    """One peer, across all its restarts."""

    def __init__(self, swarm: LocalSwarm, name: str, verb: str, *arguments: str) -> None:
        self.peer = swarm.start(name, [verb, *arguments, *LOCAL])
        self._swarm, self._again = swarm, [verb, *LOCAL]
        self._home = Home(self.peer.home)
        self._killed: Counter[str] = Counter()  # since the last start
        self._decided: set[str] = set()
        self._read_bytes = 0  # of its event log
        self.steps: list[StepDone] = []
        self._num_completed = 0

    def read_events(self) -> int:
        """Read the new events; return the number of progress events so far."""
        with suppress(FileNotFoundError), self._home.events.open("rb") as lines:
            lines.seek(self._read_bytes)
            for line in lines:
                if line.endswith(b"\n"):
                    self._read_bytes += len(line)
                    event = from_line(line)
                    self.steps += [event] if isinstance(event, StepDone) and has_stepped(event) else []
                    self._num_completed += isinstance(event, MeetingDone) and event.outcome == "completed"
        return len(self.steps)

    def decided(self) -> set[str]:
        """Return the committed meetings in its journal."""
        with suppress(FileNotFoundError):
            return {
                json.loads(line)["meeting"] for line in self._home.journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")
            }
        return set()

    def saved(self) -> dict[str, Any]:
        """Return the contents of its newest checkpoint."""
        newest = max(self._home.checkpoints.glob("step-*"), key=lambda path: int(path.name[5:13]))
        _, _, body = (newest / "header.json").read_bytes().partition(b"\n")
        state: dict[str, Any] = json.loads(body)["state"]
        return state

    def is_at_work(self) -> bool:
        """Return whether it has trained, met and saved a checkpoint."""
        return bool(self.read_events() and self.decided() and [*self._home.checkpoints.glob("step-*")])

    def kill(self, draws: random.Random) -> str:
        """Kill one of its processes; return which one after it has been replaced. A killed peer is started again."""
        what = draws.choice([part for part in PARTS if self._killed[part] < MOST])
        before = family(self.peer.home)
        before[what].kill()
        self._killed[what] += 1
        if what == "peer":
            assert gone([*before.values()], 10), "something of a killed peer lives on"
            self.peer.kill()
            self._swarm.peers.remove(self.peer)
            self.peer, self._killed = self._swarm.start(self.peer.name, self._again), Counter()
        wait_until(lambda: family(self.peer.home).get(what) not in (None, before[what]), f"another {what}", BACK_S)
        return what

    def give_way(self) -> None:
        """Lower the priority of its trainer, which would otherwise starve starting processes."""
        with suppress(KeyError, psutil.Error):
            family(self.peer.home)["trainer"].nice(19)

    def look(self) -> None:
        """Check its disk: each decided meeting is recorded, no other counts, and none counts twice."""
        decided, applied = self.decided(), self.saved()["outer"]["applied"]
        assert decided >= self._decided, "a decision is lost"
        assert len(set(applied)) == len(applied), "applied twice"
        assert decided | self.decided() >= set(applied), "applied, and not decided"
        self.read_events()
        assert self._num_completed <= len(self.decided()), "a meeting counted twice"
        self._decided = decided


def killed(number: int) -> float:
    """Kill -9 a trainer, a node or a whole peer at random times, twenty times; return the longest recovery in seconds."""
    draws = random.Random(number)
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        with local_swarm(Path(name)) as swarm:
            victims = _start(swarm, Path(name))
            worst_s = max(_one_kill(victims, draws) for _ in range(KILLS))
            _end(victims)
        counts = Counter(meeting for victim in victims for meeting in victim.decided())
        assert max(counts.values()) <= 2, "a meeting of three"
    return worst_s


def _end(victims: list[Victim]) -> None:
    """End the peers in order; no process may be left."""
    left = [process for victim in victims for process in everybody(victim.peer.home)]
    for victim in victims:
        victim.peer.ask_to_stop()
    for victim in victims:
        wait_until(lambda victim=victim: not victim.peer.refresh(), "clean end", BACK_S)  # type: ignore[misc]
        victim.look()
    assert gone(left, 10), "a process is left"


def holder_killed(number: int) -> float:
    """Kill -9 a trainer, a node or a whole peer of a staged run, four times; return the longest time until it carries hops again."""
    draws = random.Random(number)
    with tempfile.TemporaryDirectory(prefix="holders-") as name, local_swarm(Path(name)) as swarm:
        victims = _start(swarm, Path(name), STAGED, HOLDERS - 1)
        stages = sorted(int(Home(victim.peer.home).stage.read_text()) for victim in victims)
        assert stages == [1, 1, 2, 2], stages
        worst_s = max(_one_holder(victims, draws) for _ in range(HOLDERS_KILLS))
        _end(victims)
    return worst_s


def _one_holder(victims: list[Victim], draws: random.Random) -> float:
    """Kill one process of a holder, and wait until it trains again; return the seconds. The others never idle for long meanwhile."""
    victim = draws.choice(victims)
    others = [other for other in victims if other is not victim]
    time.sleep(draws.uniform(0.0, 2.0))
    for one in victims:
        one.give_way()
    before = {one: one.read_events() for one in victims}
    began_s, saved = time.time(), victim.saved()
    what = victim.kill(draws)
    back = victim.read_events()
    wait_until(lambda: victim.read_events() > back, f"step after the death of a {what}", BACK_S)
    took_s = time.time() - began_s
    for other in others:
        wait_until(lambda other=other: other.read_events() > before[other], "step of another", BACK_S)  # type: ignore[misc]
        moments = [began_s, *(step.ts for step in other.steps[before[other] :])]
        idle_s = max(after_s - before_s for before_s, after_s in itertools.pairwise(moments))
        assert idle_s <= IDLE_S, f"{other.peer.name} idles for {idle_s:.0f} s after the death of a {what} of {victim.peer.name}"
    for step in victim.steps[before[victim] :]:
        assert step.step >= saved["own_steps"] and step.global_step >= saved["clock_steps"], f"behind its checkpoint: {what}"
    for one in victims:
        one.look()
    return took_s


def _start(swarm: LocalSwarm, folder: Path, text: str = MANIFEST, num_joiners: int = JOINERS) -> list[Victim]:
    """Start a host and joiners, one after another: in a staged run each sees which stages are held. Wait until all are at work."""
    manifest = folder / "run.toml"
    manifest.write_text(text)
    host = Victim(swarm, "host", "host", str(manifest))
    invite, victims = host.peer.invite(), [host]
    for number in range(num_joiners):
        if text is STAGED:
            wait_until(Home(victims[-1].peer.home).stage.exists, f"stage of {victims[-1].peer.name}", BACK_S)
        victims.append(Victim(swarm, f"joiner-{number}", "join", invite))
    for victim in victims:
        wait_until(victim.is_at_work, f"work of {victim.peer.name}", BACK_S)
    return victims


def _one_kill(victims: list[Victim], draws: random.Random) -> float:
    """Kill one process and wait until the peer trains again; return the seconds."""
    victim = draws.choice(victims)
    time.sleep(draws.uniform(0.0, 2.0))
    others = [other for other in victims if other is not victim]
    began_s, saved, at_death = time.monotonic(), victim.saved(), victim.read_events()
    for one in victims:
        one.give_way()
    what = victim.kill(draws)
    back, decided = victim.read_events(), victim.decided()
    before = {other: other.read_events() for other in others}
    wait_until(lambda: victim.read_events() > back, f"step after the death of a {what}", BACK_S)
    wait_until(lambda: victim.decided() - decided, f"meeting after the death of a {what}", BACK_S)
    took_s = time.monotonic() - began_s
    for step in victim.steps[at_death:]:
        assert step.step >= saved["own_steps"] and step.global_step >= saved["clock_steps"], f"behind its checkpoint: {what}"
    for other in others:
        wait_until(lambda other=other: other.read_events() > before[other], "step of another", BACK_S)  # type: ignore[misc]
    for one in victims:
        one.look()
    return took_s
