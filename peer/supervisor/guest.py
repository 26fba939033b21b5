"""A trainer that this supervisor did not start: the program that uses the library and started the supervisor.

Its pipes are this process's own: events on stdin, settings on stdout. It is never killed or restarted; when it ends, the peer ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable

from gossamer.peer.machine.child import FAILED, STOP, GuestRequest
from gossamer.peer.machine.events import ENDED, OVER, Event, ProcessFailed, ProcessReported, from_line
from gossamer.peer.supervisor.child_process import LINE_BYTES, ChildExit, next_line
from gossamer.protocol.errors import ExitCode

KILLED = -9
LAST_LINES = (STOP, FAILED)  # the beginnings of lines that no settings replace


class GuestProcess:
    """The program at the other end of stdin and stdout, with the interface of a ChildProcess that is always running."""

    def __init__(self) -> None:
        self.on_event: Callable[[Event], None] = lambda event: None
        self._reader = asyncio.StreamReader(LINE_BYTES)
        self._settings_fd = os.dup(1)
        os.dup2(2, 1)  # whatever is printed here goes to the log
        os.set_blocking(self._settings_fd, False)
        self._unsent = b""  # of the line that is on its way
        self._waiting: list[bytes] = []  # lines behind it
        self._failure: ProcessFailed | None = None
        self._last_words: str | None = None
        self._is_open = True

    async def request(self) -> GuestRequest:
        """Connect stdin, and return what the program asks for. Raises ValueError for a line that is no request."""
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._reader), sys.stdin)
        return GuestRequest.model_validate_json(await self._reader.readline())

    @property
    def pid(self) -> int:
        """The program's process id."""
        return os.getppid()

    @property
    def has_finished(self) -> bool:
        """Whether it has trained to the end of the run."""
        return self._last_words == OVER

    @property
    def is_running(self) -> bool:
        """Whether its pipe is open."""
        return self._is_open

    def notify(self, line: bytes) -> None:
        """Send the program a line, without waiting for it: while the program does not read, newer settings replace earlier ones."""
        if not line.startswith(LAST_LINES):
            self._waiting = [earlier for earlier in self._waiting if earlier.startswith(LAST_LINES)]
        self._waiting.append(line)
        self._send()

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent or self._waiting:
                self._unsent = self._unsent or self._waiting.pop(0)
                self._unsent = self._unsent[os.write(self._settings_fd, self._unsent) :]
        except BlockingIOError:
            loop.add_writer(self._settings_fd, self._send)
            return
        except OSError:  # the program has ended, which ends stdin too
            self._unsent, self._waiting = b"", []
        loop.remove_writer(self._settings_fd)

    async def wait(self) -> ChildExit:
        """Forward its events until its pipe ends; return how it ended. Cancel-safe."""
        while line := await next_line(self._reader):
            event = from_line(line)
            if isinstance(event, ProcessFailed):
                self._failure = event
            elif isinstance(event, ProcessReported) and event.state == ENDED:
                self._last_words = event.reason
            elif event is not None:
                self.on_event(event)
        self._is_open = False
        if self._failure is not None:
            return ChildExit(self._failure.exit_code, self._failure.error, self._failure)
        if self._last_words is not None:
            return ChildExit(ExitCode.DONE, self._last_words, None)
        return ChildExit(KILLED, "the program that trains was killed", None)

    async def stop(self, grace_s: float) -> ChildExit | None:
        """Ask the program to stop training; return how it ended, None if it has not after `grace_s`."""
        self.notify(STOP)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                return await self.wait()
        return None

    def kill(self) -> None:
        """Do nothing: the program is the operator's."""
