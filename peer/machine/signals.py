"""The signals by which people and systems ask a process to leave."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

ASKED = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "its terminal was closed"}


@contextlib.contextmanager
def asked_to_leave(on_signal: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hand SIGTERM, Ctrl-C and a closed terminal to `on_signal`, in the running loop, while the body runs."""
    loop = asyncio.get_running_loop()
    numbers = [number for number in ASKED if signal.getsignal(number) is not signal.SIG_IGN]  # nohup means it
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
