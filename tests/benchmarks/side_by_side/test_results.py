from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.side_by_side.results import Run, keep, kept
from tests.benchmarks.side_by_side.made import made_run


def test_a_line_holds_the_whole_run() -> None:
    run = made_run("gossamer", 20.0, meetings={"completed": 7}, transfers=3)
    assert Run.from_line(run.to_line()) == run


def test_the_newest_run_of_a_setting_counts(tmp_path: Path) -> None:
    file = tmp_path / "results" / "runs.jsonl"
    assert kept(file) == {}
    first, other = made_run("ddp"), made_run("ddp", seed=1)
    for run in (first, other, replace(first, wall_s=50.0)):
        keep(file, run)
    assert {run.setting.seed: run.wall_s for run in kept(file).values()} == {0: 50.0, 1: 100.0}


def test_a_sampled_run_is_extrapolated() -> None:
    run = made_run("ddp", 5.0, outcome="stopped", own_steps=[30, 31, 30, 30])
    assert run.full_wall_s == pytest.approx(1000.0)
    assert run.sent == pytest.approx(250.0)


def test_shares_are_over_all_peers() -> None:
    run = made_run("ddp")
    assert run.blocked == pytest.approx(0.1)
    assert run.cpu_per_step == pytest.approx(0.2)
