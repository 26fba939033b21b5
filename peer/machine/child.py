"""The side of the supervisor's pipes that lives in a child process (node or trainer).

Settings come as the first line of stdin; a later line, or its end, asks the child to stop. Reports leave on stdout, one JSON object a
line, and never block: a supervisor that does not read costs it reports, not training. Nothing else may write to stdout, so it is moved
away first. Signals meant for the whole group (Ctrl-C, a closed terminal, a service manager's SIGTERM) are the supervisor's to decide on.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from peer.machine.config import PeerConfig
from protocol.errors import ExitCode, GossamerError, OperatorError

_PR_SET_PDEATHSIG = 1
_UNSENT_BYTES = 1 << 16  # reports kept while the supervisor does not read; newer ones are dropped beyond
_LAST_WORDS_S = 2.0


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """What the supervisor hands to its children."""

    config: PeerConfig
    runtime: Path  # the private runtime folder
    told_to_start: bool  # the trainer waits for the node's word before it trains from the initial weights
    supervisor: int  # process id

    def to_line(self) -> bytes:
        """Serialize to one line of JSON."""
        fields = asdict(self) | {"config": self.config.model_dump(mode="json"), "runtime": str(self.runtime)}
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ChildSettings:
        """Read it back."""
        fields = json.loads(line)
        config = PeerConfig.model_validate(fields.pop("config"))
        return cls(config=config, runtime=Path(fields.pop("runtime")), **fields)


class Supervised(Protocol):
    """What a trainer needs of its supervisor."""

    @property
    def settings(self) -> ChildSettings:
        """Return what the supervisor handed over."""

    def report(self, kind: str, fields: dict[str, Any]) -> None:
        """Send a report. Returns at once."""

    def stop_requested(self) -> bool:
        """Tell whether to stop. Returns at once."""


class Child:
    """Pipes to the supervisor. Make it before anything prints. Ends the process if the supervisor stops before it has said anything."""

    def __init__(self) -> None:
        _die_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave_it_to_the_supervisor)  # not SIG_IGN: our own children would inherit that
        line = os.fdopen(0, "rb", buffering=0, closefd=False).readline()
        if not line.endswith(b"\n"):
            sys.exit(ExitCode.DONE)
        self._settings = ChildSettings.from_line(line)
        self._reports = os.dup(1)
        os.dup2(2, 1)
        os.set_blocking(self._reports, False)
        self._unsent = b""
        self._stopping = False

    @property
    def settings(self) -> ChildSettings:
        """Return what the supervisor handed over."""
        return self._settings

    def report(self, kind: str, fields: dict[str, Any]) -> None:
        """Send a report, or drop it when the supervisor has stopped reading."""
        if len(self._unsent) < _UNSENT_BYTES:
            self._unsent += _line(kind, fields)
        with contextlib.suppress(OSError):  # full, or the supervisor is gone: then stdin has ended too
            while self._unsent:
                self._unsent = self._unsent[os.write(self._reports, self._unsent) :]

    def stop_requested(self) -> bool:
        """Tell whether the supervisor asked us to stop, or is gone. Returns at once."""
        if not self._stopping and select.select([0], [], [], 0)[0]:
            self._stopping = True
        return self._stopping

    def fail(self, error: BaseException) -> int:
        """Report what ended this process, waiting a little for the supervisor to read, and return the exit code."""
        known = error if isinstance(error, GossamerError) else None
        code = int(known.exit_code if known else ExitCode.OUR_FAULT)
        words = {
            "error": str(error) if known else f"{type(error).__name__}: {error}",
            "hint": known.hint if known else "",
            "exit_code": code,
            "final": isinstance(error, OperatorError),  # the operator must act: another try would end the same way
        }
        self._unsent += _line("failed", words)
        with contextlib.suppress(OSError):
            while self._unsent and select.select([], [self._reports], [], _LAST_WORDS_S)[1]:
                self._unsent = self._unsent[os.write(self._reports, self._unsent) :]
        return code


def _line(kind: str, fields: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


def _leave_it_to_the_supervisor(_number: int, _frame: object) -> None:
    return


def _die_with_parent() -> None:
    """Have the kernel end this process when the supervisor dies, however it dies (Linux; elsewhere the end of stdin does).

    Not left to the end of stdin alone: the next peer on this home may start at once, and two trainers must not share it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
