"""The file of a peer's events, which the supervisor alone writes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gossamer.peer.machine.events import Event, EventsLost, older, to_line

MAX_LOG_BYTES = 64 << 20  # two days of a peer that trains; one older file of this size is kept beside it


class EventLog:
    """The file that the supervisor appends to. It may be moved away or deleted at any time."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_lost = 0
        self._lost_reason = ""

    def append(self, event: Event) -> None:
        """Write an event. Raises nothing on a disk error: lost events are counted and reported later by an EventsLost."""
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
