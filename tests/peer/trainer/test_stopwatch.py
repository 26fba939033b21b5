from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.peer.machine.events import Event, StepDone
from gossamer.peer.trainer.stopwatch import InnerStep, Stopwatch
from gossamer.protocol.errors import BadSettings
from tests.peer.small import small_manifest, small_replica


class TimedReplica:
    """A stopwatch under a clock that stands still unless moved, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1000.0
        self.queued_s = 10.0
        self.events: list[Event] = []
        self.watch = Stopwatch(self.events.append, lambda: self.now_s, lambda: self.queued_s)
        self.replica = small_replica(folder / "payloads", small_manifest())

    def report(self) -> StepDone:
        self.watch.notify(self.replica, coding_cpu_s=0.25)
        event = self.events[-1]
        assert isinstance(event, StepDone)
        return event


@pytest.fixture
def timed(tmp_path: Path) -> TimedReplica:
    return TimedReplica(tmp_path)


def test_blocked_time_is_part_of_training_time(timed: TimedReplica) -> None:
    with timed.watch.blocked("meetings"):
        timed.now_s += 5.0  # before the first inner step nothing is lost
    with timed.watch.training():
        timed.now_s += 2.0
    with timed.watch.blocked("meetings"):
        timed.now_s += 0.5
    event = timed.report()
    assert (event.train_s, event.blocked_s) == (2.5, 0.5)


def test_time_without_work_is_neither_training_nor_computing(timed: TimedReplica) -> None:
    waited_s = [5.0]
    for _ in range(2):
        with timed.watch.training(lambda: waited_s[0]):
            timed.now_s, waited_s[0] = timed.now_s + 2.0, waited_s[0] + 1.5
    event = timed.report()
    assert (event.train_s, event.starved_s, event.blocked_s) == (1.0, 3.0, 0.0)
    assert timed.watch.computing_s == 1.0


def test_what_the_machine_gave_to_others_is_not_blocked_by_synchronization(timed: TimedReplica) -> None:
    with timed.watch.training():
        timed.now_s += 2.0
        timed.queued_s += 1.0
    with timed.watch.blocked("meetings"):
        timed.now_s += 0.5
        timed.queued_s += 0.375
    event = timed.report()
    assert (event.train_s, event.blocked_s) == (2.5, 0.125)
    assert timed.watch.computing_s == 1.0


def test_checkpoints_are_shown_apart_and_evaluation_beside(timed: TimedReplica) -> None:
    with timed.watch.training():
        timed.now_s += 2.0
    with timed.watch.blocked("checkpoints"):
        timed.now_s += 0.5
    with timed.watch.blocked("meetings"):
        timed.now_s += 0.25
    with timed.watch.evaluating():
        timed.now_s += 4.0
    event = timed.report()
    assert (event.train_s, event.blocked_s, event.checkpoint_s, event.evaluation_s) == (2.75, 0.75, 0.5, 4.0)


def test_time_counts_even_when_a_step_fails(timed: TimedReplica) -> None:
    with pytest.raises(FloatingPointError), timed.watch.training():
        timed.now_s += 1.0
        raise FloatingPointError
    assert timed.report().train_s == 1.0


def test_a_report_covers_the_time_since_the_last(timed: TimedReplica) -> None:
    for loss in (3.0, 1.0):
        with timed.watch.training():
            timed.now_s += 0.25
        timed.watch.step(InnerStep(loss, 1e-3, 100))
    assert not timed.watch.is_time_to_report()
    timed.now_s += 3.5
    assert timed.watch.is_time_to_report()
    event = timed.report()
    assert (event.loss, event.learning_rate, event.tokens_per_second) == (2.0, 1e-3, 50.0)
    assert not timed.watch.is_time_to_report()
    timed.now_s += 1.0
    idle = timed.report()
    assert math.isnan(idle.loss) and math.isnan(idle.learning_rate) and idle.tokens_per_second == 0.0


def test_the_rate_is_that_of_the_last_ten_seconds_and_the_wait_before_training_is_no_part_of_it(timed: TimedReplica) -> None:
    timed.now_s += 600.0
    rates = []
    for num_tokens in [100] * 12 + [0, 0, 300]:
        with timed.watch.training():
            timed.now_s += 1.0
        timed.watch.step(InnerStep(2.0, 1e-3, num_tokens))
        rates.append(timed.report().tokens_per_second)
    assert rates[:12] == [100.0] * 12
    assert rates[12:] == [90.0, 80.0, 100.0]


def test_micro_batches_of_a_stage_count_for_its_rate_before_its_step(timed: TimedReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = [0]
    monkeypatch.setattr(type(timed.replica), "num_gathered", property(lambda replica: gathered[0]))
    rates = []
    for step, num_gathered in ((0, 30), (0, 60), (90, 0), (0, 30), (0, 0)):  # the last gradient is dropped
        with timed.watch.training():
            timed.now_s += 1.0
        if step:
            timed.watch.step(InnerStep(2.0, 1e-3, step))
        gathered[0] = num_gathered
        rates.append(timed.report().tokens_per_second)
    assert rates == [30.0, 30.0, 30.0, 30.0, 24.0]


def test_a_rate_covers_both_passes_of_a_micro_batch_that_takes_long(timed: TimedReplica) -> None:
    rates = []
    for _ in range(4):
        for seconds, num_tokens in ((20.0, 0), (40.0, 120)):
            with timed.watch.training():
                timed.now_s += seconds
            timed.watch.step(InnerStep(2.0, 1e-3, num_tokens))
            rates.append(timed.report().tokens_per_second)
    assert rates[3:] == [2.0] * 5


@pytest.mark.parametrize(
    ("tokens", "loss", "words"),
    [
        (-1, 1.0, "step(tokens=-1)"),
        (2.5, 1.0, "step(tokens=2.5)"),
        (torch.tensor(2.5), None, "step(tokens="),
        (3, torch.ones(2), "one number, not 2"),
    ],
)
def test_what_is_no_count_and_no_single_loss_is_refused(tokens: Any, loss: Any, words: str) -> None:
    with pytest.raises(BadSettings) as caught:
        InnerStep.of(tokens, loss, 0.0)
    assert words in str(caught.value)


def test_counts_and_losses_of_other_types_are_read() -> None:
    step = InnerStep.of(np.int64(3), torch.ones((), requires_grad=True), 0.5)
    assert step == InnerStep(1.0, 0.5, 3) and type(step.num_tokens) is int
    assert InnerStep.of(torch.tensor(3), None, 0.0).loss is None


def test_a_step_without_a_loss_is_no_loss_of_the_mean(timed: TimedReplica) -> None:
    for loss in (None, 2.0, None, 4.0):
        timed.watch.step(InnerStep(loss, 0.1, 1))
    assert timed.report().loss == 3.0
