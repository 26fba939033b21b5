from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import nanogpt, scaling
from benchmarks.nanogpt import TARGET, enclosing, main, row, to_target
from benchmarks.scaling import Runs
from benchmarks.side_by_side.job import NANOGPT, Job
from benchmarks.side_by_side.results import Point
from gossamer.protocol.run.manifest import need_text
from tests.benchmarks.side_by_side.made import made_run

TINY = {"method": "local", "peers": "1", "batch_size": "1", "sequence_length": "8", "seed": "0"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("To be, or not to be, that is the question. " * 400)
    return file


def test_the_way_to_the_target_is_interpolated_and_missing_where_it_is_not_reached() -> None:
    curve = [Point(2.0, 10.0, TARGET + 0.2, 1.0), Point(4.0, 20.0, TARGET + 0.1, 2.0), Point(8.0, 40.0, TARGET - 0.1, 4.0)]
    assert to_target(made_run("ddp", curve=curve)) == pytest.approx((6.0, 30.0, 3.0))
    assert all(map(math.isnan, to_target(made_run("ddp", curve=curve[:2]))))
    assert all(map(math.isnan, to_target(made_run("ddp", curve=[]))))


def test_a_row_marks_a_run_that_was_stopped() -> None:
    assert row(made_run("ddp", 20.0)).split()[-4:] == ["|", "100", "25.0", "1.7000"]
    stopped = made_run("ddp", 20.0, outcome="stopped", own_steps=[30] * 4, loss_average=None)
    assert row(stopped).split()[-3:] == ["~1000", "250.0", "nan"]


def test_schedules_are_tried_until_two_enclose_the_target(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVAL_BATCHES", "CURVE_BATCHES"):
        monkeypatch.setattr(scaling, name, 1)
    monkeypatch.setattr(nanogpt, "SCHEDULES", (1, 2, 3, 4))
    runs = Runs(None, text)
    losses = {steps: runs.outcome({**TINY, "steps": str(steps)}).loss for steps in (1, 2, 3, 4)}
    assert losses[1] > losses[2] > losses[3] > losses[4]
    for target, first, tried in (
        (losses[2], 4, {4, 3, 2, 1}),
        (losses[3], 2, {2, 3}),
        (losses[4] - 1.0, 3, {3, 4}),
        (losses[1], 2, {1, 2}),
    ):
        monkeypatch.setattr(nanogpt, "TARGET", target)
        assert set(enclosing(runs, TINY, first)) == tried


def test_peers_of_the_task_read_the_given_text_in_batches_of_its_shape(text: Path, tmp_path: Path) -> None:
    job = Job(task=NANOGPT, data=str(text))
    assert need_text(job.manifest().manifest()).data.source == "text"
    batch = job.corpus(1, tmp_path).batch(0)
    assert batch.shape == (12, 65) and bytes(batch[0].tolist()).decode() in text.read_text() * 2


def test_a_race_needs_root(text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["race", "--data", str(text), "--results", str(tmp_path / "none.jsonl")]) == 2
    assert "root" in capsys.readouterr().err
