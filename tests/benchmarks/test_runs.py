from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import runs
from benchmarks.runs import Outcome, key, mean_and_error, parser, run_all

RUN = {"method": "noloco", "peers": "2", "steps": "4", "seed": "1"}


def test_the_error_is_that_of_the_mean() -> None:
    assert mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1.0 / math.sqrt(3.0)))
    mean, error = mean_and_error([2.5])
    assert mean == 2.5 and math.isnan(error)


def test_one_run_that_diverged_makes_the_mean_unknown() -> None:
    assert all(math.isnan(value) for value in mean_and_error([1.0, math.nan, 3.0]))


def test_a_run_is_its_settings_in_any_order_and_what_they_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key(RUN) == key(dict(reversed(RUN.items())))
    assert key(RUN) != key({**RUN, "seed": "2"})
    settings, _, open_settings = key(RUN).partition(" #")
    monkeypatch.setattr(runs, "EVAL_BATCHES", 7)
    assert key(RUN).startswith(settings) and not key(RUN).endswith(open_settings)


def test_what_is_kept_is_not_run_again_and_a_line_cut_off_is_passed_over(tmp_path: Path) -> None:
    keep, outcome = tmp_path / "keep.jsonl", Outcome(2.0, 1.9, 1e-3, 4.18)
    runs._keep(keep, key(RUN), outcome)
    with keep.open("a") as file:
        file.write('{"run": "method=ddp pee')
    given = parser("").parse_args(["--keep", str(keep), "--workers", "1"])
    assert run_all([RUN, RUN], given) == [outcome, outcome]


@pytest.mark.timeout(120)
def test_a_run_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = parser("").parse_args(["--keep", str(tmp_path / "keep.jsonl"), "--workers", "1"])
    small = {**RUN, "batch_size": "1", "sequence_length": "16", "codec": "fp32"}
    (first, again), kept = run_all([small, small], given), runs._kept(given.keep)
    assert first == again == kept[key(small)]
    assert 0.0 < first.averaged < 6.0 and first.weight_std > 0.0
    assert run_all([small], given) == [first]
