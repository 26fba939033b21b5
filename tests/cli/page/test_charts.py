"""Charts drawn on the server: true to their values, whatever members publish, and readable without seeing them."""

from __future__ import annotations

import re

import pytest

from gossamer.cli.page.charts import HEIGHT, WIDTH, ChartLine, chart


def drawn(line: ChartLine, places: list[float], **more: bool) -> str:
    return chart("loss <of> it", places, line, "{:g} s".format, "{:g}".format, **more)


def heights(html: str) -> list[float]:
    (path,) = re.findall(r'class="line" d="M([^"]*)"', html)
    return [float(point.split(" ")[1]) for point in path.split("L")]


def test_the_line_goes_through_its_values_and_the_axis_has_round_numbers() -> None:
    html = drawn(ChartLine("loss", [1.0, 3.0, 2.0]), [0, 5, 10])
    assert heights(html) == [HEIGHT, 0.0, HEIGHT / 2]
    assert re.findall(r"<span>([\d.]+)</span>", html) == ["3", "2.5", "2", "1.5", "1"]
    assert f"{WIDTH:g} " in html and "loss &lt;of&gt; it: loss from 1 at 0 s to 2 at 10 s" in html


def test_places_without_a_value_are_left_out_and_a_long_absence_breaks_the_line() -> None:
    values: list[float | None] = [1.0, None, 2.0, 3.0, 2.0, 1.0]
    places = [0.0, 1.0, 2.0, 3.0, 4.0, 100.0]
    assert drawn(ChartLine("loss", values), places).count('class="line"') == 2
    assert drawn(ChartLine("loss", values), places, breaks=False).count('class="line"') == 1


@pytest.mark.parametrize("told_s", [0.2, 360.0])
def test_a_curve_that_others_told_is_one_line_with_ours_however_dense_it_is(told_s: float) -> None:
    told, ours = [told_s * number for number in range(100)], [100 * told_s + 20.0 * number for number in range(17)]
    places = [*told, *ours, *(ours[-1] + 3600 + 20.0 * number for number in range(5))]
    lines = re.findall(r'class="line" d="M([^"]*)"', drawn(ChartLine("loss", [float(place) for place in places]), places))
    assert [len(line.split("L")) for line in lines] == [117, 5], "only where this member was away"


def test_the_values_of_the_line_decide_what_is_drawn_and_not_those_around_it() -> None:
    low, high = [1.0, 0.0, 1.0], [2.0, 1000.0, 2.0]
    html = drawn(ChartLine("loss", [1.5, 2.0, 1.5], low, high), [0, 1, 2])
    assert "1000" not in html.replace(f"{WIDTH:g}", "")
    assert max(heights(html)) - min(heights(html)) >= HEIGHT / 4


@pytest.mark.parametrize("values", [[], [1.0], [None, None], [1.0, None]])
def test_before_two_points_there_are_words(values: list[float | None]) -> None:
    html = drawn(ChartLine("loss", values), [float(number) for number in range(len(values))])
    assert "no curve yet" in html and "<svg" not in html


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e12, 1e-12])
def test_a_line_without_change_has_an_axis_too(value: float) -> None:
    assert len(re.findall("<span>", drawn(ChartLine("loss", [value, value]), [0, 1]))) > 5


def test_counts_are_drawn_from_zero_on_with_whole_numbers() -> None:
    html = drawn(ChartLine("members", [1, 2, 2], is_count=True), [0, 1, 2])
    assert re.findall(r"<span>([\d.]+)</span>", html) == ["2", "1", "0"]
    assert "<span>-" not in drawn(ChartLine("tokens", [0, 0], is_count=True), [0, 1])
