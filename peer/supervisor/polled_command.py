"""A command that the supervisor runs again and again beside its work."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Sequence
from typing import IO

from gossamer.peer.machine.process_group import kill_group

COMMAND_S = 30.0  # that a command may take
KILLED_S = 0.2  # that a killed command may take to end
MOST_OUTPUT_BYTES = 4096  # of a command that are read


class PolledCommand:
    """A command that is run again and again, and never waited for. `code` and `output` are those of its last run."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None  # a file: a pipe would stay open as long as a child of the command does
        self._began_s = float("-inf")
        self.code: int | None = None  # None: it has not ended yet
        self.output = ""
        self.failure = ""  # why the last run has no code

    def poll(self, command: Sequence[str], now_s: float) -> None:
        """Start the command if it is due, and note its end. Call it often; `now_s` is a monotonic clock."""
        if self._process is not None and self._process.poll() is not None:
            assert self._printed is not None
            self._printed.seek(0)
            self._end(self._process.returncode, self._printed.read(MOST_OUTPUT_BYTES).decode(errors="replace"), "")
        elif self._process is not None and now_s - self._began_s > COMMAND_S:
            self.close()
            self._end(None, "", f"it took longer than {COMMAND_S:.0f} s")
        elif self._process is None and now_s - self._began_s >= self._every_s:
            self._began_s = now_s
            self._start(command)

    def _start(self, command: Sequence[str]) -> None:
        null = subprocess.DEVNULL
        try:
            self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end of the run)
            self._process = subprocess.Popen(command, stdin=null, stdout=self._printed, stderr=null, start_new_session=True)
        except (OSError, ValueError) as error:
            self._end(None, "", str(error))

    def _end(self, code: int | None, output: str, failure: str) -> None:
        self.code, self.output, self.failure, self._process = code, output, failure, None
        if self._printed is not None:
            self._printed.close()

    def close(self) -> None:
        """Kill it, with its children, if it runs."""
        if self._process is not None:
            kill_group(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a broken device cannot be killed
                self._process.wait(KILLED_S)
            self._end(None, "", "")
