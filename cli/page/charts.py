"""Line charts as HTML and SVG, drawn on the server: a public page loads no chart library, which would be 4.8 MB for each viewer.

A label is HTML beside the drawing, so it keeps its size at every width. What is drawn is stretched to the width that there is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

NUM_TICKS = 4  # intervals between labels of the vertical axis, about
NUM_LABELS = 4  # of the horizontal axis
GAP = 6.0  # times the usual distance of two points: nothing was seen in between
NEAR = 3  # distances on each side that show the usual one: what other members told may be much denser or sparser than what this one saw
WIDTH, HEIGHT = 1000.0, 200.0
OVERSHOOT = 0.5  # of the height of the line: a range that goes farther is cut


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line of a chart, or a line with a range around it. None: there is no value at this place."""

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    is_count: bool = False  # drawn from zero on, with whole numbers at the axis


def chart(
    title: str,
    places: Sequence[float],
    line: ChartLine,
    place_text: Callable[[float], str],
    value_text: Callable[[float], str],
    *,
    breaks: bool = True,
) -> str:
    """Return a chart of a line over increasing places, as an HTML figure; with words in place of a drawing until there are two points.

    `breaks`: places are times, and nothing is drawn over a long time without a value.
    """
    known = [(place, value) for place, value in zip(places, line.values, strict=True) if value is not None]
    if len(known) < 2 or known[0][0] == known[-1][0]:
        return f'<figure class="chart"><figcaption>{escape(title)}</figcaption><p class="empty">no curve yet</p></figure>'
    ticks = _ticks(*_range(line), least=1.0 if line.is_count else 0.0)
    left, right = known[0][0], known[-1][0]

    def x(place: float) -> float:
        return round(WIDTH * (place - left) / (right - left), 1)

    def y(value: float) -> float:
        inside = min(max(value, ticks[0]), ticks[-1])
        return round(HEIGHT * (1 - (inside - ticks[0]) / (ticks[-1] - ticks[0])), 1)

    drawn = "".join(f'<path class="grid" d="M0 {y(tick):g}H{WIDTH:g}"/>' for tick in ticks)
    for part in _parts(places, line) if breaks else [[index for index, value in enumerate(line.values) if value is not None]]:
        if line.low and len(part) > 1:
            there = [(x(places[index]), y(_number(line.high[index]))) for index in part]
            back = [(x(places[index]), y(_number(line.low[index]))) for index in reversed(part)]
            drawn += f'<path class="range" d="{_path([*there, *back])}Z"/>'
        points = [(x(places[index]), y(_number(line.values[index]))) for index in part]
        drawn += f'<path class="line" d="{_path(points if len(points) > 1 else points * 2)}"/>'
    first, last = (value_text(value) for value in (known[0][1], known[-1][1]))
    words = f"{title}: {line.name} from {first} at {place_text(left)} to {last} at {place_text(right)}"
    labels = [left + (right - left) * number / (NUM_LABELS - 1) for number in range(NUM_LABELS)]
    return (
        f'<figure class="chart"><figcaption>{escape(title)}<b>{escape(last)}</b></figcaption><div class="plot"><div class="ys">'
        + "".join(f"<span>{escape(value_text(tick))}</span>" for tick in reversed(ticks))
        + f'</div><svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" role="img" aria-label="{escape(words)}">{drawn}</svg>'
        + '<div class="xs">'
        + "".join(f"<span>{escape(place_text(place))}</span>" for place in labels)
        + "</div></div></figure>"
    )


def _range(line: ChartLine) -> tuple[float, float]:
    """Return the least and the greatest value to draw: those of the line decide, not those of the range around it."""
    values = [value for value in line.values if value is not None]
    low, high = (0.0 if line.is_count else min(values)), max(values)
    room = OVERSHOOT * (high - low)
    around = [value for value in (*line.low, *line.high) if value is not None and low - room <= value <= high + room]
    return min([low, *around]), max([high, *around])


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Return round numbers at equal distances of at least `least`, the first at most `low` and the last at least `high`."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low and low - max(0.5, 0.1 * abs(low)), high + max(0.5, 0.1 * abs(high))
    rough = (high - low) / NUM_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = max(least, next(size * times for times in (1, 2, 2.5, 5, 10) if size * times >= rough * (1 - 1e-9)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, last + 1)]


def _parts(places: Sequence[float], line: ChartLine) -> Iterator[list[int]]:
    """Yield the places of unbroken pieces of the line: a member that was away has seen nothing meanwhile."""
    known = [index for index, value in enumerate(line.values) if value is not None]
    distances = [places[later] - places[sooner] for sooner, later in pairwise(known)]
    part = known[:1]
    for number, distance in enumerate(distances):
        if distance > GAP * statistics.median(distances[max(0, number - NEAR) : number + NEAR + 1]):
            yield part
            part = []
        part.append(known[number + 1])
    yield part


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def _number(value: float | None) -> float:
    assert value is not None  # where the line has a value, its range has one
    return value
