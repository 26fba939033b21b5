"""The side of the supervisor's pipes that lives in a child process (node or trainer).

Settings come as the first line of stdin; a later line, or its end, asks the child to stop. Reports leave on stdout, one JSON object a
line, and never block: a supervisor that does not read costs it reports, not training. Nothing else may write to stdout, so it is moved
away first.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peer.config import PeerConfig
from protocol.errors import ExitCode, GossamerError

_PR_SET_PDEATHSIG = 1
_UNSENT_BYTES = 1 << 16  # reports kept while the supervisor does not read; newer ones are dropped beyond


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


class Child:
    """Pipes to the supervisor. Make it before anything prints."""

    def __init__(self) -> None:
        _die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
        self.settings = ChildSettings.from_line(os.fdopen(0, "rb", buffering=0, closefd=False).readline())
        self._reports = os.dup(1)
        os.dup2(2, 1)
        os.set_blocking(self._reports, False)
        self._unsent = b""
        self._stopping = False

    def report(self, kind: str, fields: dict[str, Any]) -> None:
        """Send a report, or drop it when the supervisor has stopped reading."""
        if len(self._unsent) < _UNSENT_BYTES:
            self._unsent += json.dumps({"kind": kind, **fields}).encode() + b"\n"
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._reports, self._unsent) :]
        except OSError:
            return  # full, or the supervisor is gone: then stdin has ended too

    def stop_requested(self) -> bool:
        """Tell whether the supervisor asked us to stop, or is gone. Returns at once."""
        if not self._stopping and select.select([0], [], [], 0)[0]:
            self._stopping = True
        return self._stopping

    def fail(self, error: BaseException) -> int:
        """Report what ended this process and return its exit code."""
        known = isinstance(error, GossamerError)
        code = error.exit_code if isinstance(error, GossamerError) else ExitCode.OUR_FAULT
        hint = error.hint if isinstance(error, GossamerError) else ""
        message = str(error) if known else f"{type(error).__name__}: {error}"
        self.report("failed", {"error": message, "hint": hint, "exit_code": int(code)})
        return int(code)


def _die_with_parent() -> None:
    """Have the kernel end this process when the supervisor dies, however it dies (Linux; elsewhere the end of stdin does)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
