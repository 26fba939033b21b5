"""The closing statement says what was measured, whichever way it went."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from gossamer.cli.compare import Comparison, total_meetings
from gossamer.cli.figures import BAR_CELLS
from tests.cli.test_figures import STATUS

COMPARISON = Comparison(
    peers=2,
    steps=400,
    params=800_000,
    eval_loss_start=5.5,
    eval_loss=(2.1, 2.2),
    eval_loss_averaged=2.05,
    eval_loss_alone=2.3,
    meetings={"completed": 30, "solo": 1, "refused": 0, "failed": 0},
    bytes_sent=12_000_000,
    bits_per_param=8.06,
    blocked_seconds=(0.5, 0.5),
    train_seconds=(50.0, 50.0),
    own_steps=(400, 400),
    processor_seconds=2 * ({"training": 90.0, "coding": 2.0, "node": 8.0},),
    wall_seconds=90.4,
)


def test_json_has_the_documented_keys() -> None:
    assert {field.name for field in fields(Comparison)} == {
        "peers",
        "steps",
        "params",
        "eval_loss_start",
        "eval_loss",
        "eval_loss_averaged",
        "stages",
        "eval_loss_alone",
        "meetings",
        "bytes_sent",
        "bits_per_param",
        "blocked_seconds",
        "train_seconds",
        "own_steps",
        "processor_seconds",
        "wall_seconds",
    }


def test_the_statement_names_every_loss_and_the_best() -> None:
    text = COMPARISON.sentences("utf-8")
    for wanted in ("5.500", "peer-1", "2.100", "peer-2", "2.200", "2.050", "2.300", "0.250 nats ahead", "30 (1 solo)", "12.0 MB", "1.0 %"):
        assert wanted in text
    assert "per inner step: 250 ms, 10.0 % of it synchronization (coding 2.0 %, node 8.0 %)" in text


@pytest.mark.parametrize(("encoding", "full"), [("utf-8", "\u2588"), ("latin-1", "#"), ("ascii", "#")])
def test_the_losses_are_drawn_as_far_as_the_terminal_can(encoding: str, full: str) -> None:
    rows = COMPARISON.sentences(encoding).splitlines()[1:6]
    assert rows[0].count(full) == BAR_CELLS
    assert max(map(len, rows)) < 80, "no line breaks on a terminal"
    assert [row.count(full) for row in rows[1:]] == pytest.approx([BAR_CELLS * loss / 5.5 for loss in (2.1, 2.2, 2.05, 2.3)], abs=1)
    assert all(row.encode(encoding) for row in rows)


def test_statement_admits_a_lost_race() -> None:
    assert "is not ahead: it is 0.100 nats behind" in replace(COMPARISON, eval_loss_averaged=2.4).sentences("utf-8")


def test_a_completed_meeting_counts_once() -> None:
    assert total_meetings([STATUS, STATUS]) == {"completed": 8, "solo": 2, "refused": 0, "failed": 4}
