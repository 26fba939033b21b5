"""Progress: a table on a terminal, and only lines that say something new elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from gossamer.cli.screen import LiveTable, PlainLines, meter, screen
from tests.cli.test_figures import STATUS
from tests.clock import Clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_lines(lines: io.StringIO) -> list[str]:
    return lines.getvalue().splitlines()


def test_plain_lines_report_a_state_once() -> None:
    out = io.StringIO()
    lines = PlainLines(out, Clock())
    for _ in range(3):
        lines.show("peer-1", STATUS)
    lines.show("peer-1", STATUS | {"state": "leaving"})
    assert [text.split(",")[0] for text in shown_lines(out)] == ["peer-1: training", "peer-1: leaving"]


def test_plain_lines_report_each_tenth_of_the_run() -> None:
    out = io.StringIO()
    lines = PlainLines(out, Clock())
    for step in range(0, 401, 4):
        lines.show("peer-1", STATUS | {"step": step})
    assert len(shown_lines(out)) == 11


def test_plain_lines_report_slow_progress_by_the_clock() -> None:
    out, clock = io.StringIO(), Clock()
    lines = PlainLines(out, clock)
    for second in range(60):
        clock.now_s = float(second)
        lines.show("peer-1", STATUS | {"step": second // 10})
    assert 3 <= len(shown_lines(out)) <= 5


def test_plain_lines_report_new_reasons_but_not_each_percent() -> None:
    out, clock = io.StringIO(), Clock()
    lines = PlainLines(out, clock)
    for tenth in range(50):
        clock.now_s = tenth / 10
        lines.show("peer-1", STATUS | {"state": "joining", "reason": f"downloading: {tenth} %"})
    assert len(shown_lines(out)) == 3


def test_plain_lines_are_chosen_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with screen(io.StringIO()) as drawn:
        assert isinstance(drawn, PlainLines)
    monkeypatch.setenv("TERM", "dumb")
    with screen(Terminal()) as drawn:
        assert isinstance(drawn, PlainLines)


def test_terminal_shows_every_peer_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    with screen(out) as drawn:
        assert isinstance(drawn, LiveTable)
        drawn.show("peer-1", STATUS)
        drawn.show("peer-2", STATUS | {"state": "joining", "reason": "fetching the state from 3 peers"})
        drawn.print_line("peer-3 was stopped")
    text = out.getvalue()
    for wanted in ("peer-1", "120/400", "8/1/0/2", "peer-2", "fetching the state from 3 peers", "peer-3 was stopped"):
        assert wanted in text


def test_what_was_said_after_an_answer_stays_above_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with screen(out) as drawn:
        drawn.show("peer-1", STATUS)
        drawn.hold()
        drawn.print_line("use up to 960 GB a month?")
        drawn.print_line("monthly_traffic = 300 GB holds from now on")
        drawn.go_on()
    _, said, after = out.getvalue().partition("holds from now on")
    before_the_table, table, _ = after.partition("peer-1")
    assert said and table
    assert "\x1b[1A" not in before_the_table, "the cursor goes up and erases what was said"


def test_a_long_run_fits_into_eighty_columns_and_an_invite_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    long = {"completed": 1191, "solo": 193, "refused": 33, "failed": 0}
    status = STATUS | {"step": 4240, "total_steps": 5000, "meetings": long, "bytes": {"sent": 123_400_000, "received": 123_400_000}}
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    with screen(out) as drawn:
        drawn.show("HfcJPk", status)
        drawn.print_line("cost: " + 12 * "a word, ")
        drawn.data("gossamer1" + 100 * "a")
    text = out.getvalue()
    assert "4240/5000" in text and "1191/193/33/0" in text and "123 MB 123 MB" in text and "\u2026" not in text
    assert "a \nword" in text
    assert "gossamer1" + 100 * "a" in text


def test_a_long_operation_is_shown_as_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    with screen(out) as drawn:
        drawn.show("peer-1", STATUS | {"state": "joining", "progress": {"work": "downloading weights", "share": 0.25}})
    assert "peer-1: downloading weights" in out.getvalue()
    assert "25.0 %" in out.getvalue()


def test_data_goes_to_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with screen(io.StringIO()) as drawn:
        drawn.data("gossamer1abc")
    assert capsys.readouterr().out == "gossamer1abc\n"


def test_without_a_terminal_each_tenth_is_a_line() -> None:
    stream = io.StringIO()
    with meter(stream) as show:
        for done in range(1, 101):
            show("noloco", done, 100, 2.5)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "noloco: 10 % of 100 tokens, training loss 2.500"
    assert lines[-1].startswith("noloco: 100 %")


def test_slow_progress_is_a_line_by_the_clock_also_in_a_pipe() -> None:
    stream, clock = io.StringIO(), Clock()
    with meter(stream, "held-out loss", unit="batches", now_s=clock) as show:
        for done in range(1, 61):
            clock.now_s += 1.0
            show("measuring", done, 1000, 2.5)
    assert stream.getvalue().splitlines()[0] == "measuring: 1 % of 1000 batches, held-out loss 2.500"
    assert len(stream.getvalue().splitlines()) == 3


def test_on_a_terminal_each_training_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with meter(stream) as show:
        show("1/2 alpha 0.3", 50, 100, 2.5)
        show("2/2 alpha 0.5", 25, 100, 2.25)
    assert "1/2 alpha 0.3" in stream.getvalue()
    assert "loss 2.250" in stream.getvalue()


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with meter(stream) as show:
        show("noloco", 1, 1, 2.5)
    assert stream.getvalue() == "noloco: 100 % of 1 tokens, training loss 2.500\n"


def test_few_lines_where_few_are_wanted() -> None:
    stream = io.StringIO()
    with meter(stream, "held-out loss", num_lines=1) as show:
        for name in ("peer-1", "peer-2"):
            for done in range(1, 9):
                show(name, done, 8, 1.5)
    assert stream.getvalue().splitlines() == [f"peer-{number}: 100 % of 8 tokens, held-out loss 1.500" for number in (1, 2)]
