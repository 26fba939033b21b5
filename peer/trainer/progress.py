"""Where the trainer's time goes: in inner steps, or blocked by synchronization at the boundaries between them.

Tells the supervisor about once a second, and the event log as often while there are steps to tell of.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from peer.machine.events import EventLog, SoloStep, StepDone
from peer.trainer.replica import InnerStep, Replica

TELL_S = 1.0


class Stopwatch:
    """Timing and counting of one trainer process. Times are of this process's life, counts too."""

    def __init__(self, events: EventLog, report: Callable[[str, dict[str, Any]], None]) -> None:
        self._events = events
        self._report = report
        self._train_s = 0.0
        self._blocked_s = 0.0
        self._solo = 0
        self._losses: list[float] = []  # since the last report, like the next two
        self._learning_rate = 0.0
        self._tokens = 0
        self._told_s = time.monotonic()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count the time inside as training."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._train_s += time.perf_counter() - start_s

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Count the time inside as blocked by synchronization, and as part of training.

        What is started on a device must be finished inside, or the next inner step pays for it unseen.
        """
        start_s = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - start_s
            if self._train_s:  # before the first inner step nothing is blocked
                self._blocked_s += spent_s
                self._train_s += spent_s

    def step(self, step: InnerStep) -> None:
        """Note an inner step."""
        self._losses.append(step.loss)
        self._learning_rate = step.learning_rate
        self._tokens += step.num_tokens

    def solo(self, fragment: int, reason: str) -> None:
        """Note an outer step without a partner."""
        self._solo += 1
        self._events.append(SoloStep(fragment, reason))

    def is_time_to_tell(self) -> bool:
        """Tell whether the last report is old enough for another."""
        return time.monotonic() - self._told_s >= TELL_S

    def report(self, replica: Replica) -> None:
        """Send the trainer's part of the status, and write it to the event log where something was trained."""
        passed_s = max(1e-9, time.monotonic() - self._told_s)
        self._told_s = time.monotonic()
        status: dict[str, Any] = {
            "step": replica.clock_steps,
            "own_steps": replica.own_steps,
            "tokens": replica.tokens,
            "train_seconds": self._train_s,
            "blocked_seconds": self._blocked_s,
            "meetings": {"solo": self._solo},
            "tokens_per_second": self._tokens / passed_s,
        }
        if self._losses:
            loss = sum(self._losses) / len(self._losses)
            status["loss"] = loss
            self._events.append(
                StepDone(
                    replica.own_steps, replica.clock_steps, replica.tokens, loss, self._learning_rate,
                    self._tokens / passed_s, self._train_s, self._blocked_s,
                )
            )  # fmt: skip
        self._losses.clear()
        self._tokens = 0
        self._report("trainer", status)
