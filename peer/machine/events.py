"""What happens in a peer, as typed events in one JSONL file: the record that progress screens, dashboards and post-mortems read.

Several processes of one peer append to the same file: each line is one write to a descriptor opened for appending, so lines never mix.
Not a source of truth: nothing in training reads it back, and a disk that is full costs events, never training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

MAX_LOG_BYTES = 64 << 20  # chosen, not measured: weeks of a busy peer; one older file of this size is kept beside it


class Event(Protocol):
    """Any of the frozen dataclasses below."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The peer is in another state now."""

    state: str  # as in Status
    reason: str  # why, in words


@dataclass(frozen=True, slots=True)
class StepDone:
    """Inner steps were made; written about once a second, not for each step."""

    step: int  # own inner steps so far
    clock_steps: int  # the schedule's clock
    tokens: int  # trained by this peer so far
    loss: float  # nats per token, the mean since the previous StepDone
    learning_rate: float
    tokens_per_second: float  # since the previous StepDone
    train_s: float  # in inner steps so far, and blocked between them
    blocked_s: float  # of these, in work for meetings: the trainer could not make inner steps


@dataclass(frozen=True, slots=True)
class MeetingDone:
    """A meeting ended, one way or another."""

    partner: str  # PeerId, base58
    fragment: int
    outcome: str  # MeetingOutcome in lower case: completed busy refused gated misbehaved failed abandoned
    reason: str  # why not completed; of a completed one, that the partner may not have heard of it
    lane: str  # how the partner was reached
    bytes_sent: int
    bytes_received: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SoloStep:
    """A fragment took its outer step without a partner."""

    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is on disk."""

    step: int
    path: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """A checkpoint could not be written; the earlier ones are untouched."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointRejected:
    """A checkpoint on disk is damaged; an earlier one is used."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class EvalDone:
    """The held-out loss was measured."""

    step: int
    loss: float  # nats per token
    num_batches: int


@dataclass(frozen=True, slots=True)
class StateCloned:
    """Slow weights, momentum and clock were taken over from a donor."""

    donor: str  # PeerId, base58
    clock_steps: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NodeRestarted:
    """The node process ended unasked and was started again."""

    reason: str
    num_restarts: int  # in a row; one that had run for a minute counts as the first again


@dataclass(frozen=True, slots=True)
class TrainerRestarted:
    """The trainer process ended unasked and was started again."""

    reason: str
    num_restarts: int  # in a row; one that had run for a minute counts as the first again


@dataclass(frozen=True, slots=True)
class EventsLost:
    """Events before this one could not be written."""

    num_events: int
    reason: str


KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        StateChanged, StepDone, MeetingDone, SoloStep, CheckpointSaved, CheckpointFailed, CheckpointRejected, EvalDone, StateCloned,
        NodeRestarted, TrainerRestarted, EventsLost,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log."""

    ts: float  # seconds since 1970
    event: Event


class EventLog:
    """Appends events to one file. Each process opens its own; call it from one thread of that process."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_lost = 0
        self._lost_reason = ""
        self._descriptor = self._open()

    def append(self, event: Event) -> None:
        """Write an event. Never raises for the disk's sake: what cannot be written is counted, and told by an EventsLost later."""
        try:
            self._follow_rotation()
            if self._num_lost:
                self._write(EventsLost(self._num_lost, self._lost_reason))
                self._num_lost = 0
            self._write(event)
        except OSError as error:
            self._num_lost += 1
            self._lost_reason = error.strerror or str(error)

    def close(self) -> None:
        """Close the file; appending afterwards is an error of ours."""
        os.close(self._descriptor)

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")  # a process died, or a disk filled up, in the middle of a line: end it
        return descriptor

    def _write(self, event: Event) -> None:
        line = to_line(Entry(time.time(), event))
        if os.write(self._descriptor, line) != len(line):
            os.write(self._descriptor, b"\n")
            raise OSError(0, "a line was cut short")

    def _follow_rotation(self) -> None:
        if not self._is_current():  # another process has rotated
            self._reopen()
        if os.fstat(self._descriptor).st_size >= self._max_bytes:
            self._rotate()
            self._reopen()

    def _rotate(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            if self._is_current():
                self._path.replace(older(self._path))
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _is_current(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        return False

    def _reopen(self) -> None:
        descriptor = self._open()
        os.close(self._descriptor)
        self._descriptor = descriptor


def older(path: Path) -> Path:
    """Name the file that a full log is moved to."""
    return path.with_name(path.name + ".1")


def to_line(entry: Entry) -> bytes:
    """Serialize an entry to one line; numbers that JSON does not know (a loss that is not finite) become null."""
    fields = {key: _plain(value) for key, value in dataclasses.asdict(entry.event).items()}
    record = {"ts": round(entry.ts, 6), "event": type(entry.event).__name__, **fields}
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def from_line(line: bytes) -> Entry | None:
    """Read an entry back; None for a torn line, or for an event of another version."""
    try:
        fields = json.loads(line)
        ts, kind = fields.pop("ts"), KINDS[fields.pop("event")]
        numbers = {field.name for field in dataclasses.fields(kind) if field.type == "float"}
        event = kind(**{key: math.nan if value is None and key in numbers else value for key, value in fields.items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Entry(float(ts), event)


def read_events(path: Path) -> Iterator[Entry]:
    """Yield the entries of a log, oldest first, with the older file's before; skips what cannot be read. A missing log is empty."""
    for file in (older(path), path):
        with contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
            yield from filter(None, map(from_line, lines))


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
