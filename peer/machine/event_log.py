"""The file of a peer's events, which the supervisor alone writes.

Counts that grow come every second or two and would fill it: in a day a StepDone takes 34 MB. So from the second minute of a start on the
file has fewer of them, at last one each COUNTS_S, and always the newest one before any event but a meeting.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from gossamer.peer.machine.events import Event, EventsLost, HopsCarried, MeetingDone, NodeSpent, SoloStep, StepDone, older, to_line
from gossamer.peer.machine.status import has_stepped

MAX_LOG_BYTES = 64 << 20  # weeks of a peer that trains; one older file of this size is kept beside it
COUNTS = (StepDone, NodeSpent, HopsCarried)  # each holds all that the one before held
COUNTS_S, COUNTS_SHARE = 30.0, 100  # the longest time between two counts in the file, and its part of the time since the start


class EventLog:
    """The file that the supervisor appends to. It may be moved away or deleted at any time."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_lost = 0
        self._lost_reason = ""
        self._began_s: float | None = None  # time of the first event
        self._counted_s = -math.inf  # when counts were last written
        self._counts: dict[str, Event] = {}  # the newest, of those that are not written yet, by kind
        self._losses: list[float] = []  # of the steps since the last StepDone in the file

    def append(self, event: Event) -> None:
        """Write an event; of counts, only those that are due, and the newest ones before any other event but a meeting.

        Raises nothing on a disk error: lost events are counted and reported later by an EventsLost.
        """
        self._began_s = event.ts if self._began_s is None else self._began_s
        if isinstance(event, COUNTS):
            self._counts[event.event] = self._joined(event) if isinstance(event, StepDone) else event
            if event.ts - self._counted_s >= min(COUNTS_S, (event.ts - self._began_s) // COUNTS_SHARE):
                self._write_counts()
            return
        if not isinstance(event, MeetingDone | SoloStep):
            self._write_counts()
        self._write_safely(event)

    def _joined(self, step: StepDone) -> StepDone:
        """Return a report on all steps since the last StepDone in the file: their mean loss, and the last learning rate."""
        self._losses += [] if math.isnan(step.loss) else [step.loss]
        before = self._counts.get(step.event)
        rate = before.learning_rate if isinstance(before, StepDone) and not has_stepped(step) else step.learning_rate
        return replace(step, loss=statistics.fmean(self._losses) if self._losses else math.nan, learning_rate=rate)

    def _write_counts(self) -> None:
        for count in sorted(self._counts.values(), key=attrgetter("ts")):
            self._write_safely(count)
            self._counted_s = count.ts
        self._counts.clear()
        self._losses.clear()

    def _write_safely(self, event: Event) -> None:
        try:
            if self._num_lost:
                self._write(to_line(EventsLost(self._num_lost, self._lost_reason)))
                self._num_lost = 0
            self._write(to_line(event))
        except OSError as error:
            self._num_lost += 1
            self._lost_reason = error.strerror or str(error)

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size >= self._max_bytes:
                self._path.replace(older(self._path))
        with open(os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line  # the last line was cut by a full disk or a crash
            if file.write(line) != len(line):
                raise OSError(0, "a line was cut short")
