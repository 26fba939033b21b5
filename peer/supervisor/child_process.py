"""One child process of the supervisor: settings in, events out, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from gossamer.peer.machine.child import own_environment
from gossamer.peer.machine.events import Event, ProcessFailed, from_line
from gossamer.peer.machine.home import private
from gossamer.protocol.errors import ExitCode

LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How a child ended."""

    code: int  # negative: the signal that killed it
    reason: str
    failure: ProcessFailed | None  # the error that it reported, if any


class ChildProcess:
    """Start `python -m module`, once. Its stderr goes to the log file."""

    def __init__(self, module: str, log: Path, on_event: Callable[[Event], None]) -> None:
        self._module = module
        self._log = log
        self._on_event = on_event
        self._process: asyncio.subprocess.Process | None = None
        self._failure: ProcessFailed | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id, None before the start."""
        return self._process.pid if self._process is not None else None

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self, niceness: int = 0) -> None:
        """Start the process; it imports its program and then waits for its settings (`notify`). No niceness without the permission.

        Where the machine has no memory, process or descriptor left for it, it counts as one that has ended at once.
        """
        try:
            with os.fdopen(private(str(self._log), os.O_APPEND | os.O_CREAT | os.O_WRONLY), "ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", self._module,  # -P: a folder named `gossamer` in the current folder must not shadow ours
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, limit=LINE_BYTES,
                    env=own_environment(),
                )  # fmt: skip
        except OSError as error:
            self._failure = ProcessFailed(f"it could not be started: {error.strerror}", "", int(ExitCode.OUR_FAULT), False)
            return
        if niceness:
            with contextlib.suppress(psutil.Error):
                psutil.Process(self._process.pid).nice(niceness)

    def notify(self, line: bytes) -> None:
        """Write a line to the child, if it could be started."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self._process.stdin.write(line)

    async def wait(self) -> ChildExit:
        """Forward its events until it ends; return how it ended. Cancel-safe: the child keeps running."""
        if self._process is None or self._process.stdout is None:
            return ChildExit(ExitCode.OUR_FAULT, self._reason(ExitCode.OUR_FAULT), self._failure)
        while line := await next_line(self._process.stdout):
            event = from_line(line)
            if isinstance(event, ProcessFailed):
                self._failure = event
            elif event is not None:  # else it was killed in the middle of a line, or the line was too long
                self._on_event(event)
        code = await self._process.wait()
        return ChildExit(code, self._reason(code), self._failure)

    async def stop(self, grace_s: float) -> ChildExit | None:
        """Ask the child to stop; return how it ended, None if it was killed after `grace_s` or never ran."""
        process = self._process
        if process is None or process.stdin is None:
            return None
        with contextlib.suppress(ConnectionError):
            process.stdin.close()
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
            return None

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _reason(self, code: int) -> str:
        if self._failure is not None:
            return self._failure.error
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"killed by {names.get(-code, f'signal {-code}')}"
        return f"exit code {code}"


async def next_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line; an empty event for a part of one that is too long; nothing at the end."""
    try:
        return await reader.readline()
    except ValueError:
        return b"{}\n"
