"""The log of a peer as text: its events and the stderr of its processes, merged by time.

Both files are bounded (`EventLog`, `keep_short`). A line of stderr without time and level, from a traceback or a
daemon, counts as a warning with the time of the previous line.
"""

from __future__ import annotations

import heapq
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path

from gossamer.peer.machine import events
from gossamer.peer.machine.home import Home, private
from gossamer.peer.machine.status import figures

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"  # of what the processes log; read back below
LEVELS = ("debug", "info", "warning", "error")
MAX_LOG_BYTES = 16 << 20  # of stderr; as much again is kept beside it
TAIL_BYTES = 4 << 20  # how far back each file is read

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,](\d+))? (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
_QUIET = (events.StepDone, events.NodeSpent, events.EnergyUsed, events.PeersSeen, events.OutputsMoved, events.ConnectionsChanged)
_TROUBLE = (
    events.CheckpointFailed, events.CheckpointRejected, events.Warned, events.EventsLost, events.PartnerShunned, events.StepsGivenUp,
    events.StepsLost,
    events.ClockSet,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line, with the time (Unix seconds) and the level that it is filtered by."""

    ts: float
    level: str
    text: str

    def __str__(self) -> str:
        return f"{datetime.fromtimestamp(self.ts):%Y-%m-%d %H:%M:%S} {self.level:<7} {self.text}"


def _level_of(event: events.Event) -> str:
    if isinstance(event, _QUIET):
        return "debug"
    if isinstance(event, events.StateChanged) and event.state == "failed":
        return "error"
    has_failed = isinstance(event, events.NodeRestarted | events.TrainerRestarted) and event.num_restarts > 0
    return "warning" if has_failed or isinstance(event, _TROUBLE) else "info"


def _from_event(event: events.Event) -> LogLine:
    """Return an event as a line: its name, then its fields; empty ones are left out."""
    shown = (f"{name}={_short(value)}" for name, value in figures(event).items() if value not in ("", (), [], {}) and value == value)
    return LogLine(event.ts, _level_of(event), " ".join((event.event, *shown)))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value) if isinstance(value, str) and " " in value else str(value)


class Log:
    """The log of the peer of a home: `lines` yields the end of the log, and each later call the new lines."""

    def __init__(self, home: Home) -> None:
        self._events, self._stderr = GrowingFile(home.events), GrowingFile(home.log)
        self._stderr_ts = 0.0  # of the last line of stderr that had a time

    def lines(self) -> Iterator[LogLine]:
        """Yield the new lines, oldest first."""
        printed = map(self._from_stderr, self._stderr.lines())
        happened = (_from_event(event) for line in self._events.lines() if (event := events.from_line(line)))
        return heapq.merge(printed, happened, key=attrgetter("ts"))

    def _from_stderr(self, raw: bytes) -> LogLine:
        text = raw.decode(errors="replace").rstrip()
        stamp = _STAMPED.match(text)
        if stamp is None:
            return LogLine(self._stderr_ts, "warning", text)
        self._stderr_ts = time.mktime(time.strptime(stamp[1], "%Y-%m-%d %H:%M:%S")) + float(f"0.{stamp[2] or 0}")
        return LogLine(self._stderr_ts, {"CRITICAL": "error"}.get(stamp[3], stamp[3].lower()), text[stamp.end() :])


class GrowingFile:
    """The whole lines at the end of a file, and later ones; follows a rotation to the new file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset: int | None = None
        self._inode = 0

    def lines(self) -> list[bytes]:
        """Return the whole lines since the last call; at first those in the last TAIL_BYTES."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                start = self._start(stat)
                file.seek(start)
                text = file.read()
        except OSError:  # no file yet
            return []
        whole, newline, _ = text.rpartition(b"\n")
        self._offset, self._inode = start + len(whole) + len(newline), stat.st_ino
        return whole.splitlines() if newline else []

    def _start(self, stat: os.stat_result) -> int:
        if self._offset is None:
            return max(0, stat.st_size - TAIL_BYTES)
        return self._offset if stat.st_ino == self._inode and stat.st_size >= self._offset else 0


def keep_short(log: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Rotate the stderr log once it is long, while processes append to it. Raises OSError."""
    if log.exists() and log.stat().st_size > max_bytes:
        with log.open("rb") as full, open(events.older(log), "wb", opener=private) as older:
            shutil.copyfileobj(full, older)
        os.truncate(log, 0)
