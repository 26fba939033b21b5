"""Live progress: a table of peers or bars of a long computation on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gossamer.cli.figures import BAR_CELLS, LEGEND, StatusObject, cells, columns, line, share_text

SHOW_EVERY_STEPS_SHARE = 0.1  # a plain line at least each tenth of the run
SHOW_EVERY_S = 15.0  # and at least after this time
NARROW_CELLS = 90  # where the columns of a long run do not fit unless they stand close
REASON_EVERY_S = 2.0  # a new reason for the same state, such as a percentage, at most this often

Meter = Callable[[str, int, int, float | None], None]  # draws the name of the work, the done and total amounts, and the loss so far


class PlainLines:
    """Progress as lines: one per change of state, and one at intervals while a peer trains."""

    def __init__(self, stream: TextIO, now_s: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now_s = now_s
        self._shown: dict[str, tuple[StatusObject, float]] = {}

    def show(self, name: str, status: StatusObject) -> None:
        """Print a line for the peer if its status differs enough from the last line."""
        if self._is_news(name, status):
            self._shown[name] = (status, self._now_s())
            self.print_line(line(name, status))

    def _is_news(self, name: str, status: StatusObject) -> bool:
        if name not in self._shown:
            return True
        before, shown_s = self._shown[name]
        if status["state"] != before["state"]:
            return True
        waited_s = self._now_s() - shown_s
        if status["reason"] != before["reason"]:
            return waited_s >= REASON_EVERY_S
        steps = int(status["step"]) - int(before["step"])
        return steps > 0 and (waited_s >= SHOW_EVERY_S or steps >= SHOW_EVERY_STEPS_SHARE * int(status["total_steps"]))

    def print_line(self, sentence: str) -> None:
        """Print the sentence on its own line, where the stream takes it: a full disk or a closed pipe costs lines and nothing else."""
        with suppress(OSError):
            print(sentence, file=self._stream, flush=True)

    def hold(self) -> None:
        """Draw nothing in place, so that an answer can be typed: lines are never drawn in place."""

    def go_on(self) -> None:
        """Draw again."""

    def data(self, text: str) -> None:
        """Print the line on stdout."""
        with suppress(OSError):
            print(text, flush=True)


class LiveTable:
    """Progress as one table, redrawn in place; the reasons for the states stand below it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._statuses: dict[str, StatusObject] = {}
        self._live = self._started()

    def show(self, name: str, status: StatusObject) -> None:
        """Redraw the table with this status of the peer."""
        self._statuses[name] = status
        self._live.update(self._drawing())

    def print_line(self, sentence: str) -> None:
        """Print the sentence above the table."""
        with suppress(OSError):
            self._console.print(sentence, highlight=False, markup=False)

    def hold(self) -> None:
        """Draw nothing in place until `go_on`, so that an answer can be typed."""
        self._live.stop()

    def go_on(self) -> None:
        """Draw again, below what was typed."""
        self._live = self._started()
        if self._statuses:
            self._live.update(self._drawing(), refresh=True)

    def _started(self) -> Live:
        """Return a new drawing: one that starts again erases as many lines as it has drawn, which are those typed since."""
        live = Live(console=self._console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)
        live.start()
        return live

    def data(self, text: str) -> None:
        """Print the line on stdout; where stdout is the same terminal, above the table."""
        if sys.stdout.isatty():
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)  # it is copied: no line breaks
        else:
            print(text, flush=True)

    def _drawing(self) -> Group:
        is_narrow = self._console.width < NARROW_CELLS
        table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=is_narrow)
        unit = next(iter(self._statuses.values()))["unit"]  # of the run that all of them train
        for number, column in enumerate(columns(unit)):
            table.add_column(Text(column), justify="left" if number < 2 else "right", no_wrap=True)
        for name, status in self._statuses.items():
            table.add_row(*(Text(cell) for cell in cells(name, status)))
        names_by_reason: dict[str, list[str]] = {}
        for name, status in self._statuses.items():
            names_by_reason.setdefault(status["reason"], []).append(name)
        reasons = [Text(f"{', '.join(names)}: {reason}") for reason, names in names_by_reason.items() if reason]
        bars = Table.grid(padding=(0, 1))  # of long work; the reason of the state tells the time left
        for name, status in self._statuses.items():
            if progress := status.get("progress"):
                bar = ProgressBar(total=1.0, completed=progress["share"], width=BAR_CELLS)
                bars.add_row(Text(f"{name}: {progress['work']}"), bar, Text(share_text(progress["share"], 1)))
        return Group(table, *reasons, *([bars] if bars.rows else []), Text(LEGEND, style="dim"))


Screen = PlainLines | LiveTable
"""Where progress is drawn."""


@contextmanager
def screen(stream: TextIO) -> Iterator[Screen]:
    """Draw on `stream`: a live table where it is a terminal, plain lines where it is not."""
    if not _can_draw(stream):
        yield PlainLines(stream)
        return
    table = LiveTable(Console(file=stream))
    try:
        yield table
    finally:
        table.hold()


@contextmanager
def meter(
    stream: TextIO,
    what: str = "training loss",
    num_lines: int = 10,
    unit: str = "tokens",
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[Meter]:
    """Draw on `stream` while inside: bars on a terminal, elsewhere at least `num_lines` lines for each name, with the loss as `what`."""
    if not _can_draw(stream):
        yield _lines(stream, what, num_lines, unit, now_s)
        return
    loss = TextColumn("{task.fields[loss]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), loss, TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), refresh_per_second=4) as progress:
        yield _bars(progress)


def _lines(stream: TextIO, what: str, num_lines: int, unit: str, now_s: Callable[[], float]) -> Meter:
    shown: dict[str, tuple[int, float]] = {}  # parts that were shown, and when

    def show(name: str, done: int, total: int, loss: float | None) -> None:
        part, now = num_lines * done // total, now_s()
        before, since_s = shown.setdefault(name, (0, now))
        if (part > before or now - since_s >= SHOW_EVERY_S) and loss is not None:
            shown[name] = part, now
            print(f"{name}: {100 * done // total} % of {total} {unit}, {what} {loss:.3f}", file=stream, flush=True)

    return show


def _bars(progress: Progress) -> Meter:
    tasks: dict[str, TaskID] = {}

    def show(name: str, done: int, total: int, loss: float | None) -> None:
        words = "" if loss is None else f"loss {loss:.3f}"
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=total, loss=words)
        progress.update(tasks[name], completed=done, loss=words)

    return show


def _can_draw(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"
