"""Statuses as text: nothing lost, nothing invented, units readable."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from gossamer.cli.figures import (
    COLUMNS,
    cells,
    fitted,
    holders_text,
    lanes_text,
    line,
    loss_text,
    meetings_text,
    share_text,
    stage_text,
    starved_text,
    table_text,
    text_read,
)
from gossamer.peer.machine.units import bytes_text

STATUS: dict[str, Any] = {
    "state": "training",
    "reason": "",
    "step": 120,
    "total_steps": 400,
    "loss": 2.3456,
    "unit": "tokens",
    "tokens_per_second": 1523.4,
    "meetings": {"completed": 8, "solo": 1, "refused": 0, "failed": 2},
    "bytes": {"sent": 1_234_567, "received": 999},
    "hops": {},
    "blocked_seconds": 0.5,
    "train_seconds": 100.0,
}


def test_every_column_gets_its_cell() -> None:
    shown = dict(zip(COLUMNS, cells("peer-1", STATUS), strict=True))
    assert shown == {
        "peer": "peer-1",
        "state": "training",
        "step": "120/400",
        "loss": "2.346",
        "tok/s": "1523",
        "meetings": "8/1/0/2",
        "up": "1.2 MB",
        "down": "999 B",
        "blocked": "0.5 %",
    }


STAGED: dict[str, Any] = STATUS | {
    "stage": "2 of 3",
    "starved_seconds": 25.0,
    "stage_holders": [2, 1, 0],
    "stage_unheard": [0, 0, 0],
    "hops": {
        "outcomes": {"answered": 9, "passed_over": 1, "declined": 0}, "repeated": 3, "late": 2, "lanes_below": 1, "lanes_above": 1,
        "sent": 1_000_000, "received": 1001,
    },
    "lanes": [
        {"partner": "12D3KooWabove1", "stage": 3, "hops": 9, "unanswered": 2, "window": 4, "usual_s": 1.54},
        {"partner": "12D3KooWabove2", "stage": 3, "hops": 1, "unanswered": 1, "window": 2, "usual_s": None},
        {"partner": "12D3KooWbelow1", "stage": 1, "hops": 8, "unanswered": 0, "window": 4, "usual_s": None},
    ],
}  # fmt: skip


def test_a_stage_is_shown_with_what_came_of_its_micro_batches() -> None:
    text = stage_text(STAGED)
    assert text == "2 of 3; micro-batches: 9 answered, 1 passed over, 3 repeated, 2 late; lanes: 1 below, 1 above; 1.0 MB up, 1.0 kB down"
    assert lanes_text(STAGED) == [
        "below1, stage 1: 8 micro-batches, 0 unanswered, window 4",
        "above1, stage 3: 9 micro-batches, 2 unanswered, window 4, an answer in 1.5 s",
        "above2, stage 3: 1 micro-batch, 1 unanswered, window 2, no answer yet",
    ]
    assert starved_text(STAGED) == "20.0 % of the time, for want of micro-batches"
    assert dict(zip(COLUMNS, cells("peer", STAGED), strict=True))["up"] == "2.2 MB", "meetings and micro-batches"


@pytest.mark.parametrize(
    ("holders", "text"),
    [
        ([2, 1, 0], "2 of stage 1, 1 of stage 2, nobody of stage 3"),
        ([1] * 8 + [3], "1 to 3 of each of 9 stages"),
        ([2] * 8 + [0], "2 to 2 of each of 9 stages, nobody of stage 9"),
    ],
)
def test_who_holds_the_stages_is_said_shortly(holders: list[int], text: str) -> None:
    assert holders_text({"stage_holders": holders, "stage_unheard": [0] * len(holders)}) == text


def test_holders_that_nothing_is_heard_of_are_counted_apart() -> None:
    words = holders_text({"stage_holders": [2, 0, 1], "stage_unheard": [0, 1, 2]})
    assert words == ("2 of stage 1, nobody of stage 2 (1 more not heard from for 2 min), 1 of stage 3 (2 more not heard from for 2 min)")
    many = holders_text({"stage_holders": [2] * 12, "stage_unheard": [1, *[0] * 10, 2]})
    assert many == "2 to 2 of each of 12 stages, 3 more not heard from for 2 min"


def test_a_line_ends_with_the_reason_of_the_state() -> None:
    assert "meetings 8 (1 solo, 2 failed)" in line("peer-1", STATUS)
    assert line("peer-1", STATUS).endswith("blocked 0.5 %")
    assert line("peer-1", STATUS | {"reason": "no partner answered"}).endswith("blocked 0.5 % (no partner answered)")


def test_before_the_first_step_there_are_no_figures() -> None:
    assert loss_text(None) == "-"
    assert share_text(0.0, 0.0) == "-"
    assert meetings_text({"completed": 0, "solo": 0, "refused": 0, "failed": 0}) == "0"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (7e9, "7.0 GB"), (3e13, "30.0 TB")]
)
def test_sizes_take_the_unit_that_fits(num_bytes: float, text: str) -> None:
    assert bytes_text(num_bytes) == text


def test_what_was_read_of_a_text_and_what_not_is_one_sentence() -> None:
    text = {"path": "/data", "num_files": 1, "num_bytes": 5000, "num_skipped": 0, "skipped": ()}
    assert text_read(text) == "1 file of /data, 5.0 kB of text"
    skipped = text | {"num_files": 2, "num_skipped": 3, "skipped": ("/data/a.png is binary, not text",)}
    assert text_read(skipped) == "2 files of /data, 5.0 kB of text; not read: /data/a.png is binary, not text; and 2 more"


@pytest.mark.parametrize(("columns", "text"), [("80", "peer    met\nNTZ6ai  8"), ("10", "peer   met\nNTZ6ai 8")])
def test_columns_stand_close_where_a_terminal_is_narrow(columns: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", columns)
    assert table_text([("peer", "met"), ("NTZ6ai", "8")], str.ljust) == text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_breaks_lines_and_only_between_words(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "30")
    text = "training\n\nmy part    48640 tokens in 95 steps-of-ten\n           more"
    broken = "training\n\nmy part    48640 tokens in 95\n           steps-of-ten\n           more"
    assert fitted(text, 11) == (broken if is_terminal else text)
