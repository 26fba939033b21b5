"""The supervisor's pipes, on the side of the node or the trainer.

The first line holds the settings; each later line replaces all of them. The end of the pipe asks for a stop. Events leave on the other
pipe, one JSON object a line, without blocking: if the supervisor does not read, events are lost and training continues.

A child of the supervisor has the pipes on stdin and stdout. stdout is moved to another descriptor first, so that no other output mixes in.
The child ignores signals to its process group (Ctrl-C, a closed terminal, a service manager's SIGTERM): the supervisor decides. A program
that has started its own supervisor has them elsewhere: own_supervisor.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import Event, EventsLost, ProcessFailed, to_line
from gossamer.peer.machine.log_lines import FORMAT
from gossamer.protocol.errors import ExitCode, GossamerError, OperatorError, classified

OURS = Path(__file__).parents[3]  # the folder with the package gossamer
_PR_SET_PDEATHSIG = 1
_ERROR_CHARS = 10_000  # of an error, which may list every tensor of a model: the supervisor reads lines of a bounded length
_UNSENT_BYTES = 1 << 16  # of events kept while the supervisor does not read; beyond it, new events are dropped
_LAST_WORDS_S = 2.0
_READ_BYTES = 1 << 16
STOP = b"stop\n"  # a line in place of settings: it asks a program that is no child to stop, as the end of the pipe does
FAILED = b'{"error":'  # likewise, the beginning of the supervisor's last line to such a program


class OwnPart(BaseModel):
    """This peer's own part in the run since it joined, over all its starts: what the node publishes in its record."""

    model_config = ConfigDict(frozen=True)

    tokens: int
    own_steps: int
    loss: float | None  # as in Status
    joined: float  # Unix seconds
    carried_bytes: float  # in meetings, both directions


class ChildSettings(BaseModel):
    """What the supervisor hands to its children."""

    model_config = ConfigDict(frozen=True)

    config: PeerConfig
    peer_id: str  # base58
    runtime: Path  # the private runtime folder
    waits_for_start: bool  # the trainer waits for the node's message before it trains from the initial weights
    paused: bool = False  # the node starts no meetings: the trainer is stopped or stopping
    part: OwnPart | None = None  # sent to the node alone
    last_port: int = 0  # of this peer's node before a restart: invites and other peers name it

    def to_line(self) -> bytes:
        """Serialize to one line of JSON."""
        return self.model_dump_json().encode() + b"\n"


def own_environment() -> dict[str, str]:
    """Return the environment for a program of ours, which imports this package wherever it is started."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(OURS), os.environ.get("PYTHONPATH"))))}


class GuestRequest(BaseModel):
    """What a program asks of the supervisor that it starts: its first line."""

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    config: PeerConfig
    manifest: bytes = b""  # the signed manifest of a run to host
    invite: str = ""  # to join a run

    def to_line(self) -> bytes:
        """Serialize to one line of JSON."""
        return self.model_dump_json().encode() + b"\n"


class SupervisorPipes:
    """The trainer's or node's ends of the pipes to its supervisor: settings come in, events leave.

    `settings_fd` is read, `events_fd` is written to without blocking. Raises EOFError if the supervisor ends before the first settings.
    """

    def __init__(self, settings_fd: int, events_fd: int) -> None:
        self.error: dict[str, Any] = {}  # that ended the supervisor, as it has told a program that is no child
        self._settings_fd = settings_fd
        self._events_fd = events_fd
        os.set_blocking(events_fd, False)
        self._unsent = b""
        self._emitting = threading.Lock()
        self._num_lost = 0
        self._partial_line = b""  # the beginning of a line
        self._stopping = False
        self.has_ended = False  # the supervisor
        lines = os.fdopen(settings_fd, "rb", buffering=0, closefd=False)
        while (line := lines.readline()) == STOP:
            pass  # the reason follows
        if line.startswith(FAILED):
            self.error = json.loads(line)
        if self.error or not line.endswith(b"\n"):
            raise EOFError
        self.settings = ChildSettings.model_validate_json(line)

    def emit(self, event: Event) -> None:
        """Send an event, or drop it while the supervisor does not read; the number of lost events is sent once it reads again.

        From any thread.
        """
        with self._emitting:
            self._send()
            if len(self._unsent) >= _UNSENT_BYTES:
                self._num_lost += 1
                return
            self._report_lost()
            self._unsent += to_line(event)
            self._send()

    def _report_lost(self) -> None:
        if self._num_lost:
            self._unsent += to_line(EventsLost(self._num_lost, "the supervisor did not read them in time"))
            self._num_lost = 0

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full, or the supervisor has ended, which ends stdin too
            while self._unsent:
                self._unsent = self._unsent[os.write(self._events_fd, self._unsent) :]

    def stop_requested(self) -> bool:
        """Return whether the supervisor asked for a stop or has ended. Returns at once."""
        while not self._stopping and is_readable(self._settings_fd, 0.0):
            self.read_settings()
        return self._stopping

    def read_settings(self) -> bool:
        """Wait for the next data from the supervisor and apply it; return whether there was any: False at the end of the pipe."""
        data = os.read(self._settings_fd, _READ_BYTES)
        self.has_ended |= not data
        self._stopping |= not data
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            if line == STOP.rstrip():
                self._stopping = True
            elif line.startswith(FAILED):
                self.error = json.loads(line)
            else:
                self.settings = ChildSettings.model_validate_json(line)
        return bool(data)

    def end(self, error: BaseException | None = None) -> int:
        """Send the error that ends this process, if any; wait briefly until all events are read, and return the exit code."""
        self._report_lost()
        code = ExitCode.DONE
        if error is not None:
            shown = classified(error)
            code, final = shown.exit_code, isinstance(shown, OperatorError)  # the operator must act
            self._unsent += to_line(ProcessFailed(str(shown)[:_ERROR_CHARS], shown.hint[:_ERROR_CHARS], int(code), final))
        with contextlib.suppress(OSError):
            while self._unsent and _is_ready(self._events_fd, select.POLLOUT, _LAST_WORDS_S):
                self._unsent = self._unsent[os.write(self._events_fd, self._unsent) :]
        return int(code)


class Child(SupervisorPipes):
    """The pipes of a child process. Create it before any output. Ends the process if stdin ends before the first settings."""

    def __init__(self) -> None:
        # The end of stdin would not suffice: the next peer may start at once in this home, and two trainers must not share it.
        signal_at_parents_death(signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which child processes would inherit
        events_fd = os.dup(1)
        os.dup2(2, 1)
        try:
            super().__init__(0, events_fd)
        except EOFError:
            sys.exit(ExitCode.DONE)


def is_readable(fd: int, within_s: float) -> bool:
    """Return whether a pipe has data, or has ended, within some seconds."""
    return _is_ready(fd, select.POLLIN, within_s)


def _is_ready(fd: int, event: int, within_s: float) -> bool:
    """Wait for an event of a descriptor of any number: select() takes none above 1023."""
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(1000 * within_s))


def run_child(work: Callable[[Child], None]) -> int:
    """Do the work of a child process, send its final error, and return the exit code. An internal error is logged with its traceback."""
    child = Child()
    logging.basicConfig(format=FORMAT)
    try:
        work(child)
        return child.end()
    except Exception as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):  # of nested task groups
            first = first.exceptions[0]
        if not isinstance(first, GossamerError):
            logging.exception("internal error")  # with its time, by which `peer logs` places the traceback
        return child.end(first)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import a whole program inside, which takes seconds.

    The garbage collector is off meanwhile, which saves a quarter of the time, and never scans the loaded modules later.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def signal_at_parents_death(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies. Linux only: no effect elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
