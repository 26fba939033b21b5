"""A recorded command: what its terminal showed, and the picture of it."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

import pytest

from benchmarks.pictures.recording import COLUMNS, LAST_S, MOMENT_S, NUM_MOMENTS, ROWS, Terminal, moments, record, svg


def test_a_table_redrawn_in_place_is_shown_once() -> None:
    terminal = Terminal()
    terminal.feed("starting\r\n\x1b[1mstep\x1b[0m\r\n  1")
    terminal.feed("\r\x1b[2K\x1b[1A\x1b[2Kstep\r\n 10")
    assert terminal.screen() == ("starting", "step", " 10")


def test_long_lines_are_folded_and_early_lines_scroll_away() -> None:
    terminal = Terminal()
    terminal.feed("".join(f"line {number}\r\n" for number in range(ROWS)) + "word " * COLUMNS)
    shown = terminal.screen()
    assert len(shown) == ROWS and max(map(len, shown)) <= COLUMNS
    assert "line 0" not in shown and shown[-1].startswith("word")


def test_a_command_is_recorded_from_its_terminal() -> None:
    screens = record([sys.executable, "-c", "import sys; print(sys.stdout.isatty(), 'before'); print('\u2588 after')"])
    assert screens[-1][1] == ("True before", "\u2588 after")


def test_a_command_that_fails_makes_no_picture() -> None:
    with pytest.raises(SystemExit, match="ended with 3"):
        record([sys.executable, "-c", "raise SystemExit(3)"])


def test_moments_are_spread_evenly_from_the_first_screen_wanted() -> None:
    screens = [(float(second), (f"second {second}",)) for second in range(101)]
    frames = moments(screens, "second 30")
    assert len(frames) == NUM_MOMENTS + 1
    assert (frames[0], frames[NUM_MOMENTS // 2], frames[-1]) == (("second 30",), ("second 65",), ("second 100",))


def test_the_picture_is_an_svg_that_rests_on_the_last_screen() -> None:
    drawing = svg([("a < b",), ("the end",)], "peer demo")
    image = ET.fromstring(drawing)
    groups = image.findall("{http://www.w3.org/2000/svg}g")
    assert ["".join(group.itertext()) for group in groups] == ["a < b", "the end"]
    assert "#f0{animation:k0 9.7s step-end infinite;visibility:hidden}" in drawing and MOMENT_S + LAST_S == 9.7
    assert "infinite;visibility:visible}" in drawing
