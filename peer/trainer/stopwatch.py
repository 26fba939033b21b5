"""Where the time of the trainer's process goes: in inner steps, blocked by synchronization between them, or in evaluation."""

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, SupportsIndex

import torch
from torch import Tensor

from gossamer.peer.machine.events import Event, StepDone
from gossamer.peer.trainer.replica import Replica
from gossamer.protocol.errors import BadSettings

REPORT_S: Final = 1.0  # between two reports to the supervisor
RATE_S: Final = 10.0  # of training, at least, behind the reported rate: micro-batches of a stage come in bursts
RATE_REPORTS: Final = 4  # at least, behind the rate: both passes of a micro-batch that takes minutes
MOST_COUNT: Final = (1 << 63) - 1  # that ranks can tell each other

Blocker = Literal["meetings", "checkpoints"]
"""What blocks a trainer between inner steps."""


@dataclass(frozen=True, slots=True)
class InnerStep:
    """What one inner step did."""

    loss: float | Tensor | None  # per token; a tensor on a device is read at the next report, not before; None: not known
    learning_rate: float
    num_tokens: int

    @classmethod
    def of(cls, tokens: int, loss: float | Tensor | None, learning_rate: float) -> InnerStep:
        """Check what a program reports of its step. Raises BadSettings for what is no count, and no single loss."""
        num_tokens = count_of(tokens)
        if num_tokens < 0:
            raise BadSettings(
                f"step(tokens={tokens!r}): it takes a count, an int", hint="pass the number of examples or tokens of this step"
            )
        if not isinstance(loss, Tensor):
            return cls(None if loss is None else float(loss), learning_rate, num_tokens)
        if loss.numel() != 1:
            raise BadSettings(f"step(loss=...): it takes one number, not {loss.numel()}", hint="pass the mean: loss.mean()")
        return cls(float(loss.detach()) if loss.device.type == "cpu" else loss.detach(), learning_rate, num_tokens)


def count_of(tokens: SupportsIndex) -> int:
    """Return the count that a program gives; -1 for anything that is none."""
    try:
        count = operator.index(tokens)
    except TypeError:
        return -1
    return count if 0 <= count <= MOST_COUNT else -1


class Stopwatch:
    """Where the time of one trainer process goes, from its start: in inner steps, or blocked by synchronization between them.

    `queued_s` returns for how long this thread was ready while the machine ran other programs: that is not blocked time.
    """

    def __init__(self, emit: Callable[[Event], None], now_s: Callable[[], float], queued_s: Callable[[], float]) -> None:
        self._emit = emit
        self._now_s = now_s
        self._queued_s = queued_s
        self.train_s = 0.0
        self.computing_s = 0.0  # in inner steps, without the time in which the machine ran other programs
        self.blocked_s: dict[Blocker, float] = {"meetings": 0.0, "checkpoints": 0.0}  # parts of `train_s`
        self.evaluation_s = 0.0  # not part of `train_s`
        self.starved_s = 0.0  # at a stage, without work; not part of `train_s`
        self._steps: list[InnerStep] = []  # since the last report
        self._reported_s = self._now_s()
        self._rate = TrainingRate()
        self._has_trained = False  # since the last report
        self._start_cpu_s = time.process_time()

    @contextlib.contextmanager
    def training(self, waited_s: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
        """Count the time inside as training, but for what `waited_s` grows by: the time without work."""
        start_s, start_queued_s, start_waited_s = self._now_s(), self._queued_s(), waited_s()
        try:
            yield
        finally:
            starved_s = waited_s() - start_waited_s
            self.starved_s += starved_s
            self.add(max(0.0, self._now_s() - start_s - starved_s), self._queued_s() - start_queued_s)

    def add(self, spent_s: float, queued_s: float = 0.0) -> None:
        """Count some time as training; for `queued_s` of it the machine ran other programs."""
        self.train_s += spent_s
        self.computing_s += max(0.0, spent_s - queued_s)
        if not self._has_trained:
            self._has_trained = True
            self._rate.begin(self._now_s() - spent_s)

    @contextlib.contextmanager
    def blocked(self, by: Blocker) -> Iterator[None]:
        """Count the time inside as blocked, and as part of training.

        Work that is started on a device must be finished inside, or it counts as the next inner step.
        """
        start_s, start_queued_s = self._now_s(), self._queued_s()
        try:
            yield
        finally:
            spent_s, queued_s = self._now_s() - start_s, self._queued_s() - start_queued_s
            if self.train_s:  # before the first inner step nothing is blocked
                self.train_s += spent_s
                self.blocked_s[by] += max(0.0, spent_s - queued_s)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count the time inside as evaluation, neither training nor blocked."""
        start_s = self._now_s()
        yield
        self.evaluation_s += self._now_s() - start_s

    def step(self, step: InnerStep) -> None:
        """Note an inner step."""
        self._steps.append(step)

    def is_time_to_report(self) -> bool:
        """Return whether the last report is old enough for another."""
        return self._now_s() - self._reported_s >= REPORT_S

    def notify(self, replica: Replica, coding_cpu_s: float) -> float:
        """Emit the trainer's progress; `coding_cpu_s` is the processor time of the exchange's thread. Return the mean loss, else NaN."""
        self._reported_s = self._now_s()
        so_far = replica.own_steps, replica.global_step, replica.tokens
        blocked_s, cpu_s = sum(self.blocked_s.values()), time.process_time() + replica.program.cpu_s()
        training_cpu_s = cpu_s - self._start_cpu_s - coding_cpu_s
        spent_s = self.train_s, blocked_s, training_cpu_s, coding_cpu_s, self.blocked_s["checkpoints"], self.evaluation_s, self.starved_s
        loss, rate = mean_loss(self._steps), self._steps[-1].learning_rate if self._steps else math.nan
        num_tokens = sum(step.num_tokens for step in self._steps)
        tokens_per_s = self._rate.after(self._reported_s, num_tokens, replica.num_gathered, has_trained=self._has_trained)
        self._has_trained = False
        self._emit(StepDone(*so_far, loss, rate, tokens_per_s, *spent_s))
        self._steps.clear()
        return loss


class TrainingRate:
    """Tokens a second over the last RATE_S of training, and over RATE_REPORTS reports at least; 0 where nothing was trained since the last.

    A stage may need minutes for a step, so the micro-batches in the gradient count before it.
    """

    def __init__(self) -> None:
        self._since_s = 0.0  # the last report, or the beginning of training
        self._gathered = 0  # tokens in the gradient at the last report
        self._reports: deque[tuple[float, int]] = deque()  # seconds, and tokens trained in them

    def begin(self, now_s: float) -> None:
        """Note that training begins, or goes on."""
        self._since_s = self._since_s if self._reports else now_s

    def after(self, now_s: float, num_tokens: int, num_gathered: int, *, has_trained: bool) -> float:
        """Return the rate, where the steps since the last report held so many tokens, and the gradient of the next one holds so many."""
        trained = max(0, num_tokens + num_gathered - self._gathered)  # less where a gradient was dropped
        self._gathered = num_gathered
        if not has_trained:
            self._reports.clear()
            return 0.0
        self._reports.append((now_s - self._since_s, trained))
        self._since_s = now_s
        seconds = math.fsum(passed_s for passed_s, _ in self._reports)
        while len(self._reports) > RATE_REPORTS and seconds - self._reports[0][0] >= RATE_S:
            seconds -= self._reports.popleft()[0]
        return sum(tokens for _, tokens in self._reports) / max(1e-9, seconds)


def mean_loss(steps: Iterable[InnerStep]) -> float:
    """Return the mean of the losses that are known, NaN without any. Waits for a device once, for all losses that lie there."""
    known = [step.loss for step in steps if step.loss is not None]
    there = [loss.reshape(()) for loss in known if isinstance(loss, Tensor)]
    values = [loss for loss in known if not isinstance(loss, Tensor)]
    if there:
        values += torch.stack([loss.to(there[-1].device) for loss in there]).tolist()
    return sum(values) / len(values) if values else math.nan
