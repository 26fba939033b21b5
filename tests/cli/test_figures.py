"""Statuses as text: nothing lost, nothing invented, units readable."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.cli.figures import COLUMNS, cells, line, loss_text, meetings_text, share_text, text_read
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
