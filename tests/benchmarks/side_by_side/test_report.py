from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

import pytest

from benchmarks.side_by_side.picture import draw, ticks
from benchmarks.side_by_side.report import table
from benchmarks.side_by_side.results import Run
from tests.benchmarks.side_by_side.made import made_run


def cells(fault: str, runs: Sequence[Run]) -> list[dict[str, str]]:
    titles, _, *rows = (
        line.strip("| ").split(" | ") for line in table(fault, runs, {run.setting: run for run in runs}).splitlines() if "|" in line
    )
    return [dict(zip(titles, row + [""], strict=False)) for row in rows]


def test_figures_are_compared_with_the_floor() -> None:
    floor, ours = cells("none", [made_run("floor", wall_s=80.0, cpu_s=[40.0] * 4), made_run("gossamer")])
    assert (floor["wall s"], floor["of the floor"]) == ("80", "1.00")
    assert (ours["wall s"], ours["of the floor"]) == ("100", "1.25")
    assert ours["CPU s per own step (of the floor)"] == "0.200 (1.50)"
    assert ours["MB sent per peer"] == "25.0"
    assert ours["last step to end, s"] == "7.0"
    assert ours["of each peer"] == "1.710 to 1.740"


def test_several_seeds_make_one_row_with_its_error() -> None:
    (row,) = cells("none", [made_run("local_sgd", seed=seed, loss_average=loss) for seed, loss in enumerate((1.7, 1.8, 1.9))])
    assert row["loss of the average"] == "1.800 +- 0.058"


def test_fast_lines_come_first() -> None:
    rows = cells("none", [made_run("gossamer", 5.0), made_run("ddp", 20.0), made_run("gossamer", 20.0), made_run("ddp")])
    assert [(row["line"], row["system"]) for row in rows] == [
        ("unshaped", "DDP, gloo"),
        ("20 Mbit/s", "Gossamer"),
        ("20 Mbit/s", "DDP, gloo"),
        ("5 Mbit/s", "Gossamer"),
    ]


def test_a_stopped_run_of_an_exact_system_has_the_loss_of_its_whole_one() -> None:
    stopped = {"outcome": "stopped", "own_steps": [30] * 4, "loss_average": None, "losses": [None] * 4}
    rows = cells("none", [made_run("ddp", loss_average=1.595), made_run("ddp", 5.0, **stopped), made_run("averager", 5.0, **stopped)])
    assert [(row["wall s"], row["loss of the average"]) for row in rows] == [("100", "1.595"), ("~1000", "-"), ("~1000", "1.595*")]


def test_a_fault_is_shown_beside_the_run_without() -> None:
    killed = made_run("gossamer", 20.0, fault="kill", wall_s=80.0, own_steps=[300, 300, 300, 150], loss_average=1.75, pause_s=(1.5, 2.0))
    runs = {run.setting: run for run in (killed, made_run("gossamer", 20.0))}
    shown = table("kill", [killed], runs)
    for words in ("| 80 (100) |", "| 1.5 / 2.0 |", "| 1.750 (1.700) |", "| 300, 300, 300, 150 |"):
        assert words in shown


def test_a_system_that_waits_for_ever_has_no_wall_time() -> None:
    shown = table("cut", [made_run("local_sgd", 20.0, fault="cut", outcome="hangs: no step for 50 s", own_steps=[150] * 4)], {})
    assert "| hangs: no step for 50 s | - (-) |" in shown


def test_failures_are_remarked() -> None:
    row = cells(
        "none",
        [made_run("gossamer", outcome="failed: it broke | badly", meetings={"gated": 3, "busy": 9}, transfers=2, all_training_s=8.0)],
    )[0]
    assert row["remarks"] == "failed: it broke / badly, 3 gated, 2 state transfers, all train after 8 s"


def test_a_table_without_runs_has_a_note() -> None:
    assert "no runs yet" in table("cut", [], {})


def test_the_picture_has_a_curve_and_a_dot_for_each_run() -> None:
    runs = [made_run("gossamer", 20.0), made_run("ddp", 20.0, outcome="stopped", loss_average=None), made_run("floor")]
    drawn = ElementTree.fromstring(draw(runs))
    curves = [element for element in drawn.iter() if element.tag.endswith("polyline")]
    dots = [element for element in drawn.iter() if element.tag.endswith("circle") and element.get("stroke") == "white"]
    assert (len(curves), len(dots)) == (6, 4)  # each in both panels of its line


@pytest.mark.parametrize(("low", "high", "expected"), [(1.0, 20.0, [1, 2, 5, 10, 20]), (0.3, 1.2, [0.5, 1])])
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)
