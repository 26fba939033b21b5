from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peer.machine.events import EventLog, SoloStep, StepDone, read_events
from peer.trainer import progress as stopwatch
from peer.trainer.progress import Stopwatch
from peer.trainer.replica import InnerStep
from tests.peer.small import small_manifest, small_replica


class Told:
    """A stopwatch under a clock that stands still unless moved, and what it told."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        patch.setattr(stopwatch.time, "perf_counter", lambda: self.now_s)
        patch.setattr(stopwatch.time, "monotonic", lambda: self.now_s)
        self.path = folder / "events.jsonl"
        self.reports: list[dict[str, Any]] = []
        self.log = EventLog(self.path)
        self.watch = Stopwatch(self.log, lambda _, fields: self.reports.append(fields))
        self.replica = small_replica(folder / "payloads", small_manifest())

    def report(self) -> dict[str, Any]:
        self.watch.report(self.replica)
        return self.reports[-1]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(tmp_path, monkeypatch)


def test_blocked_time_is_part_of_training_time(told: Told) -> None:
    with told.watch.blocked():
        told.now_s += 5.0  # before the first inner step nothing is lost
    with told.watch.training():
        told.now_s += 2.0
    with told.watch.blocked():
        told.now_s += 0.5
    report = told.report()
    assert (report["train_seconds"], report["blocked_seconds"]) == (2.5, 0.5)


def test_time_counts_even_when_a_step_fails(told: Told) -> None:
    with pytest.raises(FloatingPointError), told.watch.training():
        told.now_s += 1.0
        raise FloatingPointError
    assert told.report()["train_seconds"] == 1.0


def test_a_report_is_of_the_time_since_the_last(told: Told) -> None:
    for loss in (3.0, 1.0):
        told.watch.step(InnerStep(loss, 1e-3, 100))
    assert not told.watch.is_time_to_tell()
    told.now_s += 4.0
    assert told.watch.is_time_to_tell()
    report = told.report()
    assert (report["loss"], report["tokens_per_second"]) == (2.0, 50.0)
    assert not told.watch.is_time_to_tell()
    told.now_s += 1.0
    report = told.report()
    assert "loss" not in report  # none was measured: the last one stands
    assert report["tokens_per_second"] == 0.0
    (entry,) = read_events(told.path)
    assert isinstance(entry.event, StepDone)
    assert (entry.event.loss, entry.event.learning_rate) == (2.0, 1e-3)


def test_solo_steps_are_counted_and_logged(told: Told) -> None:
    told.watch.solo(2, "no partner answered in time")
    assert told.report()["meetings"] == {"solo": 1}
    assert [entry.event for entry in read_events(told.path)] == [SoloStep(2, "no partner answered in time")]
