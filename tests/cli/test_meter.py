from __future__ import annotations

import io

import pytest

from cli.meter import Bars, Lines, meter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_each_tenth_is_a_line() -> None:
    stream = io.StringIO()
    with meter(stream) as drawn:
        for done in range(1, 101):
            drawn.show("noloco", done, 100, 2.5)
    assert isinstance(drawn, Lines)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "noloco: 10 % of 100 tokens, training loss 2.500"
    assert lines[-1].startswith("noloco: 100 %")


def test_on_a_terminal_each_training_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with meter(stream) as drawn:
        drawn.show("1/2 alpha 0.3", 50, 100, 2.5)
        drawn.show("2/2 alpha 0.5", 25, 100, 2.25)
    assert isinstance(drawn, Bars)
    assert "1/2 alpha 0.3" in stream.getvalue()
    assert "loss 2.250" in stream.getvalue()


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with meter(Terminal()) as drawn:
        assert isinstance(drawn, Lines)
