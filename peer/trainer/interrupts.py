"""Ctrl-C in the middle of a change that must be made wholly: it waits for the end of the change."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted(*, unless: bool = False) -> Iterator[None]:
    """Let Ctrl-C wait for the end of the context, which is short; `unless`: it is not. On any thread: Ctrl-C reaches the main one alone."""
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if unless or not callable(handler):  # by default, SIGINT is default_int_handler; others end the process, or do nothing
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
