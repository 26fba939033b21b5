"""How far a long computation has come: a bar where stderr is a terminal, a line at each tenth everywhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

NUM_LINES = 10


class Meter(Protocol):
    """Where progress is drawn."""

    def show(self, name: str, done: int, total: int, loss: float) -> None:
        """Draw how much of the training called `name` is done, in tokens, and its newest loss."""
        ...


class Lines:
    """Progress as lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: dict[str, int] = {}

    def show(self, name: str, done: int, total: int, loss: float) -> None:
        """Print a line when another tenth is done."""
        tenth = NUM_LINES * done // total
        if tenth > self._shown.get(name, 0):
            self._shown[name] = tenth
            print(f"{name}: {100 * done // total} % of {total} tokens, training loss {loss:.3f}", file=self._stream, flush=True)


class Bars:
    """Progress as one bar for each training."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, name: str, done: int, total: int, loss: float) -> None:
        """Move the bar."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, loss=loss)
        self._progress.update(self._tasks[name], completed=done, loss=loss)


@contextmanager
def meter(stream: TextIO) -> Iterator[Meter]:
    """Draw on `stream` while inside."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield Lines(stream)
        return
    loss = TextColumn("loss {task.fields[loss]:.3f}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), loss, TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), refresh_per_second=4) as progress:
        yield Bars(progress)
