"""The control socket of a running peer, in its runtime folder: both are made again where the system has removed them.

systemd-logind removes all files of a user in /dev/shm at the end of the last session (RemoveIPC), also those of a peer that goes on in tmux
or below nohup.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from gossamer.peer.machine import control_socket
from gossamer.peer.machine.control_socket import Answer
from gossamer.peer.machine.events import Event, Warned
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.runtime_folder import LOCK_NAME, held

TOPIC: Final = "runtime"
REMEDY: Final = "if that was at the end of a session, `loginctl enable-linger` keeps it"


class RuntimeWatch:
    """Serves the control socket while `open`; `emit` gets a warning. Belongs to one event loop."""

    def __init__(self, home: Home, runtime: Path, answer: Answer, emit: Callable[[Event], None]) -> None:
        self._home, self._runtime, self._answer, self._emit = home, runtime, answer, emit
        self._stack = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Answer requests while the body runs."""
        async with self._stack:
            await self._serve()
            yield

    async def _serve(self) -> None:
        await self._stack.enter_async_context(control_socket.serving(self._home, self._runtime, self._answer))

    async def look(self) -> bool:
        """Make folder and socket again if they are gone; return whether they were. Where they cannot be made, the next look tries again."""
        if (self._runtime / control_socket.SOCKET_NAME).exists():
            return False
        with contextlib.suppress(OSError):
            self._runtime.mkdir(mode=0o700, exist_ok=True)
            if self._runtime.lstat().st_uid != os.getuid():  # another user has made it, where the first one was
                return False
            if not (self._runtime / LOCK_NAME).exists():
                self._stack.enter_context(held(self._runtime))
            await self._serve()
            self._emit(Warned(TOPIC, f"the system had removed {self._runtime}, so the network part started again; {REMEDY}"))
            return True
        return False
