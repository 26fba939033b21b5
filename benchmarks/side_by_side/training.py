"""One peer of a rival system: the inner steps of Gossamer's own trainer, with the system's exchange between them.

A rival is a class with `Rival`'s three methods. It may replace `module` (called forwards) or `optimizer` (whose `step` is called). As in
Gossamer, the time between two inner steps counts as blocked, and so does the time in `step` beyond the inner optimizer's own. At the same
steps as Gossamer's trainer it measures a small held-out loss and saves. It writes Gossamer's own events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from benchmarks.side_by_side.job import Seat
from gossamer.optim.inner import build_optimizer, learning_rate, set_learning_rate
from gossamer.peer.machine.event_log import EventLog
from gossamer.peer.machine.events import EvalDone, Event, StateChanged, StepDone
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.processor_queue import queued_clock
from gossamer.peer.model.checkpoint import CheckpointContents, save
from gossamer.peer.model.computing import next_token_loss
from gossamer.peer.model.evaluation import held_out_loss
from gossamer.peer.model.model import build_model
from gossamer.peer.model.plan import inner_settings
from gossamer.peer.model.weights import FAST
from gossamer.peer.trainer.losses import EVAL_INTERVAL_STEPS, NUM_EVAL_BATCHES
from gossamer.peer.trainer.stopwatch import REPORT_S
from gossamer.protocol.run.manifest import need_text


class Rival(Protocol):
    """A system's part in one peer's training. Creating a rival connects it with the others."""

    def after_step(self, own_steps: int) -> None:
        """Exchange if it is due."""

    def finish(self) -> None:
        """Exchange once more after the last inner step."""

    def close(self) -> None:
        """Disconnect; called when all peers have finished."""


class Training:
    """The replica of one peer, with its times."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.own_steps = 0
        self.blocked_s = 0.0
        self._signed = seat.job.manifest()
        self.manifest = need_text(self._signed.manifest())
        self._home = Home(seat.home)
        self._settings = inner_settings(self.manifest)
        self._log = EventLog(self._home.events)
        self._corpus = seat.job.corpus(seat.number, self._home.cache)
        self.model = build_model(self.manifest.model, self.manifest.run.seed)
        self.module: Any = self.model  # what is called: a rival may wrap the model
        self.inner = build_optimizer(self.manifest.inner.optimizer, self.model.named_parameters(), self._settings)
        self.optimizer: Any = self.inner  # whose step is called: a rival may wrap it
        self._inner_s = 0.0  # in the inner optimizer's own step, so far
        self._train_s = 0.0
        self._losses: list[float] = []  # since it was told last
        self._reported_s = 0.0
        self._queued_s = queued_clock()
        self.inner.register_step_pre_hook(lambda *_: self._count_inner(-time.monotonic()))
        self.inner.register_step_post_hook(lambda *_: self._count_inner(time.monotonic()))
        write_whole(self._home.manifest, self._signed.to_bytes())

    def _count_inner(self, moment_s: float) -> None:
        self._inner_s += moment_s

    def report_state(self, state: str, reason: str = "") -> None:
        """Write an event with this peer's state."""
        self._emit(StateChanged(state, reason))

    def run(self, rival: Rival) -> None:
        """Train to the end of the schedule, measure and save. Raises whatever the rival raises when its network fails."""
        self._reported_s = time.monotonic()
        while self.own_steps < self.manifest.run.total_steps:
            self._step()
            with self.blocked():
                rival.after_step(self.own_steps)
            self._housekeeping()
        with self.blocked():
            rival.finish()
        self._report_step()
        self._evaluate()
        self._save()

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Count the time inside the context as blocked, and as training time."""
        start_s, start_queued_s = time.monotonic(), self._queued_s()
        try:
            yield
        finally:
            spent_s = time.monotonic() - start_s
            self.blocked_s += max(0.0, spent_s - (self._queued_s() - start_queued_s))
            self._train_s += spent_s

    def _step(self) -> None:
        start_s = time.monotonic()
        batch = self._corpus.batch(self.own_steps)
        set_learning_rate(self.inner, learning_rate(self.own_steps, self.own_steps, self._settings))
        self.inner.zero_grad(set_to_none=True)
        loss = next_token_loss(self.module, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.manifest.inner.clip_norm)
        inner_s, step_s = self._inner_s, time.monotonic()
        self.optimizer.step()
        end_s = time.monotonic()
        self.blocked_s += (end_s - step_s) - (self._inner_s - inner_s)
        self._train_s += end_s - start_s
        self.own_steps += 1
        self._losses.append(float(loss.detach()))

    def _housekeeping(self) -> None:
        if time.monotonic() - self._reported_s >= REPORT_S:
            self._report_step()
        if self.own_steps % EVAL_INTERVAL_STEPS == 0 and self.own_steps < self.manifest.run.total_steps:
            self._evaluate()
            self._save()

    def _report_step(self) -> None:
        if not self._losses:
            return
        now_s, inner = time.monotonic(), self.manifest.inner
        step_tokens = inner.batch_size * inner.sequence_length
        loss = sum(self._losses) / len(self._losses)
        tokens_per_s = len(self._losses) * step_tokens / (now_s - self._reported_s)
        rate = float(self.inner.param_groups[0]["lr"])
        tokens = self.own_steps * step_tokens
        spent_s = self._train_s, self.blocked_s, time.process_time(), 0.0
        self._emit(StepDone(self.own_steps, self.own_steps, tokens, loss, rate, tokens_per_s, *spent_s))
        self._reported_s = now_s
        self._losses.clear()

    def _evaluate(self) -> None:
        loss = held_out_loss(self.model, self._corpus, NUM_EVAL_BATCHES)
        self._emit(EvalDone(self.own_steps, loss, NUM_EVAL_BATCHES))

    def _save(self) -> None:
        tensors = {FAST + name: parameter.detach() for name, parameter in self.model.named_parameters()}
        save(self._home.checkpoints, CheckpointContents(self.manifest.run_id, self.own_steps, tensors, {}))

    def _emit(self, event: Event) -> None:
        self._log.append(event)
