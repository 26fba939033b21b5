"""Where the trainer's time goes: in inner steps, or blocked by synchronization at the boundaries between them.

Tells the supervisor about once a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from peer.machine.events import Event, StepDone, TrainerIdle
from peer.trainer.replica import InnerStep, Replica

TELL_S = 1.0


class Stopwatch:
    """Timing of one trainer process, from its start."""

    def __init__(self, emit: Callable[[Event], None], now_s: Callable[[], float]) -> None:
        self._emit = emit
        self._now_s = now_s
        self._train_s = 0.0
        self._blocked_s = 0.0
        self._losses: list[float] = []  # since it was told last, like the next two
        self._learning_rate = 0.0
        self._tokens = 0
        self._told_s = self._now_s()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count the time inside as training."""
        start_s = self._now_s()
        try:
            yield
        finally:
            self._train_s += self._now_s() - start_s

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Count the time inside as blocked by synchronization, and as part of training.

        What is started on a device must be finished inside, or the next inner step pays for it unseen.
        """
        start_s = self._now_s()
        try:
            yield
        finally:
            spent_s = self._now_s() - start_s
            if self._train_s:  # before the first inner step nothing is blocked
                self._blocked_s += spent_s
                self._train_s += spent_s

    def step(self, step: InnerStep) -> None:
        """Note an inner step."""
        self._losses.append(step.loss)
        self._learning_rate = step.learning_rate
        self._tokens += step.num_tokens

    def is_time_to_tell(self) -> bool:
        """Return whether the last telling is old enough for another."""
        return self._now_s() - self._told_s >= TELL_S

    def tell(self, replica: Replica) -> None:
        """Emit how far the trainer is."""
        passed_s = max(1e-9, self._now_s() - self._told_s)
        self._told_s = self._now_s()
        step, clock_steps, tokens = replica.own_steps, replica.clock_steps, replica.tokens
        if self._losses:
            loss, tokens_per_s = sum(self._losses) / len(self._losses), self._tokens / passed_s
            self._emit(StepDone(step, clock_steps, tokens, loss, self._learning_rate, tokens_per_s, self._train_s, self._blocked_s))
        else:
            self._emit(TrainerIdle(step, clock_steps, tokens, self._train_s, self._blocked_s))
        self._losses.clear()
        self._tokens = 0
