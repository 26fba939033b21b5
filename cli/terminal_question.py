"""Ask the operator of a peer that runs in the foreground of a terminal, on the event loop, while the peer goes on."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

from gossamer.cli.screen import Screen
from gossamer.peer.machine.control_socket import ask
from gossamer.protocol.errors import BadSettings


class TerminalQuestion:
    """One question at a time. `stdin` is read only if it is the terminal of a command in the foreground."""

    def __init__(self, home: Path, drawn: Screen, stdin: TextIO = sys.stdin) -> None:
        self._home = home
        self._drawn = drawn
        self._stdin = stdin
        self.is_open = False
        self._work: list[asyncio.Future[object]] = []  # requests to the peer, which answers on this loop

    @property
    def can_ask(self) -> bool:
        """Whether this is a terminal that this process may read: a read in the background would stop it."""
        try:
            return self._stdin.isatty() and os.tcgetpgrp(self._stdin.fileno()) == os.getpgrp()
        except (OSError, ValueError):  # closed, or not our terminal
            return False

    def ask(self, words: str, on_answer: Callable[[str], str], on_background: Callable[[], None]) -> None:
        """Show a question. `on_answer` gets each line, and returns what is wrong with it; without a fault the question is closed.

        `on_background` is called instead where the command has left the foreground meanwhile.
        """
        self.is_open = True
        self._drawn.hold()
        self._drawn.print_line(words)
        asyncio.get_running_loop().add_reader(self._stdin.fileno(), self._read, on_answer, on_background)

    def request(self, request: dict[str, object], said: str) -> None:
        """Say what follows, and ask it of the peer of this process, from another thread: the peer answers on this loop."""
        self._drawn.print_line(said)
        self._work.append(asyncio.get_running_loop().run_in_executor(None, partial(_tell, self._home, request)))

    def _read(self, on_answer: Callable[[str], str], on_background: Callable[[], None]) -> None:
        if not self.can_ask:  # Ctrl-Z and bg since the question: the shell reads the line
            self._close()
            on_background()
        elif trouble := on_answer(self._stdin.readline().strip()):
            self._drawn.print_line(trouble)
        else:
            self._close()

    def _close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._stdin.fileno())
        self._drawn.go_on()
        self.is_open = False


def _tell(home: Path, request: dict[str, object]) -> None:
    try:
        ask(home, request)
    except BadSettings as error:
        print(f"warning: {error}", file=sys.stderr)
