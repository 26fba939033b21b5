"""The running peers of a system: started on their lines, followed by their event logs, started and stopped."""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.side_by_side.job import Job, Seat
from benchmarks.side_by_side.network import Line
from benchmarks.side_by_side.processes import ProcessGroup, process_group
from benchmarks.side_by_side.systems import ROOT, System
from gossamer.peer.machine.events import MeetingDone, SoloStep, StateChanged, StateTransferred, StepDone, from_line
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import has_stepped
from gossamer.protocol.errors import BadSettings

READY_S = 240.0  # from start to readiness, at most
LEAVE_S = 15.0
POLL_S = 0.05
USUAL = frozenset({"completed", "busy"})  # of a meeting's outcomes
OVER = frozenset({"done", "failed", "left"})
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
ON_ONE_THREAD = ("--devices", "cpu", "--threads", "1", "--port", "0")


@dataclass(slots=True)
class Follower:
    """The state of a peer by its event log."""

    path: Path
    state: str = "starting"
    reason: str = ""
    began: float = 0.0  # to train; Unix seconds, as all moments here
    over: float = 0.0
    reports: list[StepDone] = field(default_factory=list)
    meetings: Counter[str] = field(default_factory=Counter)  # by outcome
    reasons: Counter[str] = field(default_factory=Counter)  # of the unusual ones, without their figures
    transfers: int = 0
    _read_bytes: int = 0

    @property
    def own_steps(self) -> int:
        """Return the peer's inner steps at its last report."""
        return self.reports[-1].step if self.reports else 0

    @property
    def global_step(self) -> int:
        """Return the peer's global step."""
        return self.reports[-1].global_step if self.reports else 0

    @property
    def is_over(self) -> bool:
        """Return whether the peer has ended or failed."""
        return self.state in OVER

    def follow(self) -> None:
        """Read new events."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # the rest of it is still being written
                self._read_bytes += len(line)
                self.apply(line)

    def apply(self, line: bytes) -> None:
        """Apply one event."""
        match from_line(line):
            case StateChanged() as changed:
                self.state, self.reason = changed.state, changed.reason
                if changed.state == "training" and not self.began:
                    self.began = changed.ts
                if self.is_over:
                    self.over = changed.ts
            case StepDone() as report if has_stepped(report):
                self.reports.append(report)
            case MeetingDone(outcome=outcome, reason=reason):
                self.meetings[outcome] += 1
                if outcome not in USUAL:
                    self.reasons[f"{outcome}: {re.sub('[0-9.]+', '#', reason)}"] += 1
            case SoloStep(reason=reason):
                self.meetings["solo"] += 1
                self.reasons[f"solo: {reason}"] += 1
            case StateTransferred():
                self.transfers += 1


@dataclass(slots=True)
class RunningPeer:
    """One peer: its processes, its line, and its state."""

    number: int
    home: Home
    line: Line
    group: ProcessGroup
    process: subprocess.Popen[bytes]
    follower: Follower

    def refresh(self) -> None:
        """Read the peer's log; a process that ended without an event has failed."""
        has_ended = self.process.poll() is not None
        self.follower.follow()
        if has_ended and not self.follower.is_over:
            self.follower.state, self.follower.reason, self.follower.over = "failed", self.last_words(), time.time()

    def last_words(self) -> str:
        """Return the last line of the peer's output."""
        lines = output_of(self.home).read_text(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no word")

    def send(self, word: bytes) -> None:
        """Write to the peer's stdin, if it reads it."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.write(word)
                self.process.stdin.flush()

    def close_now(self) -> None:
        """Close the peer's stdin, which tells it to leave; a peer without stdin gets SIGTERM."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        elif self.process.poll() is None:
            self.process.terminate()


@contextmanager
def running(system: System, job: Job, lines: Sequence[Line], folder: Path) -> Iterator[list[RunningPeer]]:
    """Start all peers of a system, and yield them when they are ready: rivals wait for a line on stdin, Gossamer may train already.

    At the end all processes are gone. Raises BadSettings for a peer that does not get ready.
    """
    start = start_rivals if system.rival else start_gossamer
    with ExitStack() as stack:
        groups = [stack.enter_context(process_group(str(line.number))) for line in lines]
        peers = list(start(system, job, lines, groups, folder))
        ready = {"ready"} if system.rival else {"training"}
        wait_until_ready(peers, ready)
        yield peers
        for peer in peers:
            peer.close_now()
        until_s = time.monotonic() + LEAVE_S
        while any(peer.process.poll() is None for peer in peers) and time.monotonic() < until_s:
            time.sleep(POLL_S)


def wait_until_ready(peers: Sequence[RunningPeer], ready: set[str]) -> None:
    """Wait until all rivals are ready, or until the first Gossamer peer trains, while others may still join."""
    until_s = time.monotonic() + READY_S
    enough = all if ready == {"ready"} else any
    while True:
        for peer in peers:
            peer.refresh()
            if peer.follower.is_over:
                raise BadSettings(
                    f"peer {peer.number} ended before it was ready: {peer.follower.reason}", hint=f"see {output_of(peer.home)}"
                )
        if enough(peer.follower.state in ready for peer in peers):
            return
        if time.monotonic() > until_s:
            states = ", ".join(f"{peer.number} {peer.follower.state}" for peer in peers)
            raise BadSettings(f"the peers were not ready within {READY_S:.0f} s: {states}", hint=f"see {output_of(peers[0].home)}")
        time.sleep(POLL_S)


def start_rivals(system: System, job: Job, lines: Sequence[Line], groups: Sequence[ProcessGroup], folder: Path) -> Iterator[RunningPeer]:
    """Start one process per peer."""
    addresses = tuple(line.address for line in lines)
    for line, group in zip(lines, groups, strict=True):
        home = furnished(job, line, folder)
        seat = Seat(system.name, line.number, home.path, folder, addresses, job)
        command = [system.python(), "-m", "benchmarks.side_by_side.seat", seat.to_text()]
        yield start_peer(line, group, home, command, stdin=subprocess.PIPE)


def start_gossamer(system: System, job: Job, lines: Sequence[Line], groups: Sequence[ProcessGroup], folder: Path) -> Iterator[RunningPeer]:
    """Start `peer host`, then `peer join` with its invite for the others."""
    manifest = folder / "manifest.toml"
    manifest.write_text(job.manifest(job.gossamer_outer()).manifest().to_toml())
    words = ["host", str(manifest), "--wait-for-peers", str(len(lines) - 1)]
    for line, group in zip(lines, groups, strict=True):
        peer = start_one(system, job, line, group, folder, words)
        if line.number == 1:
            words = ["join", wait_for_invite(peer)]
        yield peer


def start_one(system: System, job: Job, line: Line, group: ProcessGroup, folder: Path, words: Sequence[str]) -> RunningPeer:
    """Start one Gossamer peer by its command."""
    home = furnished(job, line, folder)
    text = ("--data", job.data) if job.data else ()
    command = [system.python(), "-m", "gossamer.cli.main", *words, *text, *ON_ONE_THREAD, "--home", str(home.path)]
    return start_peer(line, group, home, command, stdin=subprocess.DEVNULL)


def wait_for_invite(host: RunningPeer) -> str:
    """Return the invite that the host prints. Raises BadSettings if it does not."""
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s and host.process.poll() is None:
        words = output_of(host.home).read_text(errors="replace").split()
        if invite := next((word for word in words if word.startswith("gossamer1")), None):
            return invite
        time.sleep(POLL_S)
    raise BadSettings(f"the host printed no invite: {host.last_words()}", hint=f"see {output_of(host.home)}")


def furnished(job: Job, line: Line, folder: Path) -> Home:
    """Create a peer's home."""
    home = Home(folder / f"peer-{line.number}")
    job.furnish(home, line.number)
    return home


def start_peer(line: Line, group: ProcessGroup, home: Home, command: Sequence[str], *, stdin: int) -> RunningPeer:
    """Start a peer's first process, in its namespace and its group."""
    process = group.start(line.inside(command), ENVIRONMENT, output_of(home), stdin=stdin)
    return RunningPeer(line.number, home, line, group, process, Follower(home.events))


def output_of(home: Home) -> Path:
    """Return the file of a peer's output."""
    return home.path / "output.txt"
