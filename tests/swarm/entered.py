"""Records which files of the product run, in the order in which each is entered first, with the functions that were called there."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
LOOP = Path(asyncio.__file__).parent.as_posix()  # a call stack is followed down to the event loop that runs it
STAND_INS = {  # what a test swarm puts in the place of sockets: Link is the node's end, End the trainer's
    ("tests/swarm/trainer.py", "Link"): ("peer/link/socket.py", "NodeEnd"),
    ("tests/swarm/trainer.py", "End"): ("peer/link/socket.py", "TrainerEnd"),
}


class Entered:
    """The files entered, each with the qualified names of its functions, in order.

    Only files in `folders` count, and no call of a function in `background`, nor any that it makes. With `turn` and `event` the record
    begins with the last call of `turn` before the first one of `event`.
    """

    def __init__(self, folders: Collection[str], background: Collection[str], turn: str = "", event: str = "") -> None:
        self.files: dict[str, dict[str, None]] = {}
        self.is_on = False
        self._folders = tuple(folders)
        self._background = frozenset(background)
        self._turn, self._event = turn, event
        self._places: dict[str, str] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every thread that is started inside, and this one; calls are recorded while `is_on`."""
        threading.setprofile(self._on_call)
        sys.setprofile(self._on_call)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _on_call(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_on or event != "call":
            return
        file, name = self._place(frame), frame.f_code.co_qualname
        if name == self._turn:
            self.files.clear()
        elif name == self._event:
            self._turn = ""
        owner, dot, rest = name.partition(".")
        file, owner = STAND_INS.get((file, owner), (file, owner))
        name = owner + dot + rest
        if not file.startswith(self._folders) or name in self.files.get(file, ()) or name == "<module>":
            return
        if self._background.isdisjoint(self._stack(frame)):
            self.files.setdefault(file, {})[name] = None

    def _stack(self, frame: FrameType) -> Iterator[str]:
        inner: FrameType | None = frame
        while inner is not None and not inner.f_code.co_filename.startswith(LOOP):
            yield inner.f_code.co_qualname
            inner = inner.f_back

    def _place(self, frame: FrameType) -> str:
        path = frame.f_code.co_filename
        if path not in self._places:
            resolved = Path(path).resolve()
            self._places[path] = resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else path
        return self._places[path]
