"""One child process as the supervisor sees it: settings in, reports out, and why it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPORT_BYTES = 1 << 20
MAX_LOG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended."""

    code: int  # negative: the signal that killed it
    reason: str
    failure: dict[str, Any] | None  # its last words: error, hint, exit_code


class ChildProcess:
    """Start `python -m module`, once. Its stderr goes to the log file."""

    def __init__(self, module: str, log: Path, on_report: Callable[[dict[str, Any]], None]) -> None:
        self._module = module
        self._log = log
        self._on_report = on_report
        self._process: asyncio.subprocess.Process | None = None
        self._failure: dict[str, Any] | None = None

    async def start(self) -> None:
        """Start the process; it imports what it needs and then waits for its settings (`tell`)."""
        if self._log.exists() and self._log.stat().st_size > MAX_LOG_BYTES:
            self._log.replace(self._log.with_suffix(".log.1"))
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, limit=REPORT_BYTES,
            )  # fmt: skip

    def tell(self, line: bytes) -> None:
        """Write a line to the child."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(line)

    async def wait(self) -> Exit:
        """Pass its reports on until it ends, and say how it ended. Cancel-safe: the child lives on."""
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            report = json.loads(line)
            if report["kind"] == "failed":
                self._failure = report
            self._on_report(report)
        code = await self._process.wait()
        return Exit(code, self._reason(code), self._failure)

    async def stop(self, grace_s: float) -> None:
        """Ask the child to stop, and kill it after `grace_s`."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.close()
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _reason(self, code: int) -> str:
        if self._failure is not None:
            return str(self._failure["error"])
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"
