"""The picture: loss against wall time and against bytes sent, as SVG, with a row of two panels per line and a colour per system.

A curve is the smoothed training loss. The dot at its end is the held-out loss of the result: of the average of the weights, or, without any
exchange, the mean of the peers. So a dot is above its curve by the difference between training and held-out text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.side_by_side.results import Point, Run
from benchmarks.side_by_side.systems import FLOOR, SYSTEMS

WIDTH, HEIGHT, GAP, TOP, LEFT = 430, 300, 70, 70, 60
LOSSES = (1.5, 3.0)  # nats, from bottom to top
SMOOTH_POINTS = 7
COLOURS = dict(zip(SYSTEMS, ("#888888", "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#e377c2", "#ff7f0e"), strict=True))
STYLE = 'font-family="sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True)
class Axis:
    """A horizontal axis with a logarithmic scale."""

    title: str
    span: float  # the highest value over the lowest that is shown, at most
    of: Callable[[Point], float]
    end: Callable[[Run], float]


AXES = (
    Axis("wall time, s", 150.0, lambda point: point.wall_s, lambda run: run.full_wall_s),
    Axis("sent per peer, MB", 1000.0, lambda point: point.sent_mb, lambda run: run.sent),
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: its place and its axes."""

    axis: Axis
    left: float
    top: float
    low: float
    high: float

    def x(self, value: float) -> float:
        """Return the horizontal place of a value."""
        return self.left + WIDTH * math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)

    def y(self, loss: float) -> float:
        """Return the vertical place of a loss."""
        low, high = LOSSES
        return self.top + HEIGHT * (high - min(max(loss, low), high)) / (high - low)

    def frame(self, title: str) -> Iterator[str]:
        """Draw borders, grid and figures."""
        yield f'<rect x="{self.left}" y="{self.top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#444"/>'
        yield text(self.left + WIDTH / 2, self.top - 8, title, "middle")
        yield text(self.left + WIDTH / 2, self.top + HEIGHT + 34, self.axis.title, "middle")
        for value in ticks(self.low, self.high):
            yield line(self.x(value), self.top, self.x(value), self.top + HEIGHT)
            yield text(self.x(value), self.top + HEIGHT + 16, f"{value:g}", "middle")
        for tenths in range(round(10 * LOSSES[0]), round(10 * LOSSES[1]) + 1, 5):
            yield line(self.left, self.y(tenths / 10), self.left + WIDTH, self.y(tenths / 10))
            yield text(self.left - 6, self.y(tenths / 10) + 4, f"{tenths / 10:.1f}", "end")

    def curve(self, run: Run) -> Iterator[str]:
        """Draw one run."""
        colour, points = COLOURS[run.setting.system], [point for point in smoothed(run.curve) if self.axis.of(point) > self.low]
        places = " ".join(f"{self.x(self.axis.of(point)):.1f},{self.y(point.loss):.1f}" for point in points if point.loss < LOSSES[1])
        yield f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.2" opacity="0.7"/>'
        if (loss := final_loss(run)) is not None:
            yield f'<circle cx="{self.x(self.axis.end(run)):.1f}" cy="{self.y(loss):.1f}" r="4.5" fill="{colour}" stroke="white"/>'


def draw(runs: Sequence[Run]) -> str:
    """Return the runs without a fault as one SVG document."""
    rates = sorted({run.setting.mbit_per_s for run in runs}, key=lambda rate: -(rate or math.inf))
    width, height = LEFT + 2 * (WIDTH + GAP), TOP + len(rates) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {STYLE}>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    parts += legend([name for name in SYSTEMS if any(run.setting.system == name for run in runs)])
    reaches = [reach(axis, runs) for axis in AXES]  # the same for all lines, so that one can look down a column
    for number, rate in enumerate(rates):
        shown = [run for run in runs if run.setting.mbit_per_s == rate]
        for column, axis in enumerate(AXES):
            panel = Panel(axis, LEFT + column * (WIDTH + GAP), TOP + number * (HEIGHT + GAP), *reaches[column])
            parts += [*panel.frame(f"{rate:g} Mbit/s" if rate else "unshaped"), *(mark for run in shown for mark in panel.curve(run))]
    return "\n".join([*parts, "</svg>\n"])


def reach(axis: Axis, runs: Sequence[Run]) -> tuple[float, float]:
    """Return the range of an axis."""
    ends = [end for run in runs if math.isfinite(end := axis.end(run)) and end > 0]
    high = 1.2 * max(ends, default=1.0)
    starts = [axis.of(point) for run in runs for point in run.curve if axis.of(point) > 0]
    return max(min(starts, default=0.1), high / axis.span), high


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the running mean of the loss."""
    windows = (points[max(0, end - SMOOTH_POINTS) : end] for end in range(1, len(points) + 1))
    return [Point(part[-1].wall_s, part[-1].own_steps, statistics.fmean(one.loss for one in part), part[-1].sent_mb) for part in windows]


def final_loss(run: Run) -> float | None:
    """Return the final loss of a run; None if it was not measured."""
    peers = [loss for loss in run.losses if loss is not None]
    return (statistics.fmean(peers) if peers else None) if run.setting.system == FLOOR else run.loss_average


def ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5, 10, ... within a range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for power in powers for digit in (1, 2, 5) if low <= (value := digit * 10.0**power) <= high]


def legend(names: Sequence[str]) -> list[str]:
    """Draw the legend in two rows."""
    marks, half = [], (len(names) + 1) // 2
    for number, name in enumerate(names):
        x, y = LEFT + (number % half) * 260, 18 + 20 * (number // half)
        marks += [f'<circle cx="{x}" cy="{y}" r="5" fill="{COLOURS[name]}"/>', text(x + 10, y + 4, SYSTEMS[name].title, "start")]
    return marks


def text(x: float, y: float, words: str, anchor: str) -> str:
    """Return a text element."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x: float, y: float, other_x: float, other_y: float) -> str:
    """Return a line of the grid."""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{other_x:.1f}" y2="{other_y:.1f}" stroke="#ddd"/>'
