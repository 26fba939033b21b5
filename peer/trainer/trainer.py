"""The trainer's loop: one replica makes inner steps, and opens to the node's requests between them and beside them.

It never waits for the network: with no node at the other end of the link it trains on and takes solo steps. How the two windows work, and
which thread does what: exchange.py.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Literal

from gossamer.peer.link import messages
from gossamer.peer.machine.child import Child
from gossamer.peer.machine.events import EvalDone, Event, ProcessReported, StepDone
from gossamer.peer.model.evaluation import held_out_loss
from gossamer.peer.trainer.exchange import TrainerExchange
from gossamer.peer.trainer.interval import Pace
from gossamer.peer.trainer.replica import InnerStep, Replica
from gossamer.peer.trainer.saver import Saver
from gossamer.peer.trainer.shared_state import judged_loss
from gossamer.protocol.errors import OperatorError
from gossamer.protocol.messages.messages import RunPhase

REPORT_S = 1.0  # between two reports to the supervisor
IDLE_S = 0.05  # how long a trainer with nothing to train waits for the node at a time
LONELY_FINISH_S = 60.0  # after so long without a node the trainer gives up the last averaging
EVAL_INTERVAL_STEPS = 100  # inner steps between two measurements of the held-out loss
NUM_EVAL_BATCHES = 8  # in each: enough to follow a run; reported figures rest on evaluation.NUM_BATCHES...
MOST_EVAL_TOKENS = 32_768  # ...of at most so many tokens together: eight large batches take as long as three steps
MAX_BAD_BATCHES = 10  # in a row, before the trainer stops: the run diverges


class State(Enum):
    """The trainer's lifecycle state."""

    READY = auto()  # waits for the node's Start
    BEGUN = auto()  # trains, or takes part in the last averaging
    OVER = auto()  # the last averaging is over


Blocker = Literal["meetings", "checkpoints"]
"""What blocks a trainer between inner steps."""


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
        self._steps: list[InnerStep] = []  # since the last report
        self._reported_s = self._now_s()
        self._start_cpu_s = time.process_time()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count the time inside as training."""
        start_s, start_queued_s = self._now_s(), self._queued_s()
        try:
            yield
        finally:
            spent_s = self._now_s() - start_s
            self.train_s += spent_s
            self.computing_s += max(0.0, spent_s - (self._queued_s() - start_queued_s))

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

    def notify(self, replica: Replica, coding_cpu_s: float) -> None:
        """Emit the trainer's progress; `coding_cpu_s` is the processor time of the exchange's thread."""
        passed_s = max(1e-9, self._now_s() - self._reported_s)
        self._reported_s = self._now_s()
        so_far = replica.own_steps, replica.global_step, replica.tokens
        blocked_s, cpu_s = sum(self.blocked_s.values()), time.process_time() + replica.inner.devices.cpu_s()
        training_cpu_s = cpu_s - self._start_cpu_s - coding_cpu_s
        spent_s = self.train_s, blocked_s, training_cpu_s, coding_cpu_s, self.blocked_s["checkpoints"], self.evaluation_s
        loss, rate = math.nan, math.nan  # without an inner step
        if self._steps:
            loss, rate = sum(step.loss for step in self._steps) / len(self._steps), self._steps[-1].learning_rate
        tokens_per_s = sum(step.num_tokens for step in self._steps) / passed_s
        self._emit(StepDone(*so_far, loss, rate, tokens_per_s, *spent_s))
        self._steps.clear()


class Trainer:
    """Drive a replica, one `tick` at a time: `run` does it for a process, a test in its own time. Belongs to one thread.

    `now_s` is a monotonic clock; `queued_s` returns for how long that thread has waited for a processor.
    """

    def __init__(
        self,
        child: Child,
        replica: Replica,
        exchange: TrainerExchange,
        saver: Saver,
        now_s: Callable[[], float],
        queued_s: Callable[[], float],
    ) -> None:
        self.state = State.READY
        self._child = child
        self._is_alone = child.settings.config.alone
        self._replica = replica
        self._exchange = exchange
        self._pace = Pace(replica, child.emit)
        self._saver = saver
        self._now_s = now_s
        self._watch = Stopwatch(child.emit, now_s, queued_s)
        self._node_seen_s = now_s()
        self._bad_batches = 0  # in a row, up to the last one
        self._reported = ("", "")

    def run(self) -> None:
        """Train to the end of the run, or until asked to stop; save before returning."""
        try:
            self.start()
            while self.state is not State.OVER and not self._child.stop_requested():
                self._exchange.wait(self.tick())
            self.end()
        except OperatorError:  # raised between two steps only, so nothing is half done
            if not self._bad_batches:
                self._saver.save(self._replica)
            raise
        finally:
            self.close()

    def start(self) -> None:
        """Listen to the node, and begin to train unless the node must say so first."""
        self._exchange.start()
        if self._saver.has_checkpoint or not self._child.settings.waits_for_start:
            self._begin()
        else:
            self._report_state("ready", "")

    def tick(self) -> float:
        """Take one turn: answer the node, make an inner step if the run still trains, report and save what is due.

        Returns for how many seconds there is nothing to do unless the node sends a request. Raises OperatorError for a run that diverges or
        a text that cannot be read.
        """
        if not self.is_training:
            if self.state is State.BEGUN and self._replica.brought_loss is None:
                with self._watch.evaluating():
                    self._replica.brought_loss = judged_loss(self._replica)
            self.answer_node()
            if self.state is State.BEGUN and self._replica.phase is RunPhase.FINISH:
                self._finish()
            return IDLE_S
        with self._watch.blocked("meetings"):
            self.answer_node()
        if self.is_training:  # a meeting may have set the clock to the end of the schedule
            self._inner_step()
        self._housekeeping()
        return 0.0

    def answer_node(self) -> None:
        """Open the boundary to the node: the part of a turn that is done even where nothing is trained."""
        for request in self._exchange.at_boundary():
            match request:
                case messages.Start():
                    self._begin()
                case messages.FinishDone():
                    if self._replica.phase is RunPhase.FINISH:
                        self.state = State.OVER
                case messages.WriteResult() | messages.Adopt():  # the run may be over for the others before this trainer could be restarted
                    if self._replica.phase is RunPhase.FINISH:
                        self._saver.save(self._replica)
                case messages.Adopted():
                    if self._saver.has_checkpoint:
                        self._saver.begin(self._replica, self._reading())
                    self._begin()
        if self._exchange.has_node:
            self._node_seen_s = self._now_s()

    def end(self) -> None:
        """Save, and report how it ended: at a step boundary, once."""
        is_over = self.state is State.OVER
        if is_over:
            self._exchange.take_last_solo_steps()
            self._evaluate()
        if self.state is not State.READY and (is_over or not self._bad_batches):
            self._saver.save(self._replica)
        self._watch.notify(self._replica, self._exchange.cpu_s)
        if is_over:
            self._exchange.send_progress(done=True)

    def close(self) -> None:
        """Close the link, the threads and the text."""
        self._exchange.close()
        self._saver.finish()
        self._replica.corpus.close()
        self._replica.inner.devices.close()

    @property
    def is_training(self) -> bool:
        """Whether the next turn makes an inner step."""
        return self.state is State.BEGUN and self._replica.phase is RunPhase.TRAIN

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Open the other window at a boundary: inside the weights are only read, afterwards the model moves by what was decided."""
        with self._exchange.while_weights_are_read():
            yield
        self._replica.move_fast_weights()

    def _begin(self) -> None:
        """Begin, or go on, with a checkpoint: a restarted trainer that has one need not wait for the node's Start."""
        self.state, self._exchange.has_begun = State.BEGUN, True
        if not self._saver.has_checkpoint:
            self._saver.save(self._replica)
        self._report_state("training", self._saver.trouble)
        self._exchange.send_progress()

    def _inner_step(self) -> None:
        try:
            with self._watch.training():
                step = self._replica.inner_step(self._exchange.while_weights_are_read())
        except FloatingPointError as error:
            self._skip_bad_batch(error)
            return
        self._bad_batches = 0
        self._watch.step(step)
        due = [] if self._is_alone else self._replica.countdown.tick()
        if due:
            with self._watch.blocked("meetings"):
                self._exchange.announce(due)

    def _skip_bad_batch(self, error: FloatingPointError) -> None:
        self._bad_batches += 1
        self._replica.skip_batch()
        if self._bad_batches >= MAX_BAD_BATCHES:
            raise OperatorError(
                f"{MAX_BAD_BATCHES} batches in a row gave no finite loss (the last: {error})",
                hint="the earlier checkpoints are untouched; lower [inner] learning_rate in the manifest, or check the text",
            )

    def _housekeeping(self) -> None:
        self._report_if_time()
        if self._replica.own_steps % EVAL_INTERVAL_STEPS == 0:
            self._evaluate()
        self._saver.look()
        if self._saver.is_due(self._replica) and not self._bad_batches:  # weights that do not work must not replace those that did
            with self._watch.blocked("checkpoints"):
                self._saver.begin(self._replica, self._reading())
        self._report_state("training", self._saver.trouble)

    def _finish(self) -> None:
        """The schedule has ended: only answer meetings, until the node reports the end of the last averaging."""
        is_lonely = self._now_s() - self._node_seen_s > LONELY_FINISH_S
        if self._is_alone or is_lonely:
            self.state = State.OVER
            return
        self._report_state("finishing", "the schedule has run out: averaging with the others")
        self._report_if_time()

    def _report_if_time(self) -> None:
        if self._watch.is_time_to_report():
            exchange, watch = self._exchange, self._watch
            watch.notify(self._replica, exchange.cpu_s)
            self._exchange.send_progress()
            self._pace.update(exchange.report, watch.train_s, watch.blocked_s["meetings"], exchange.cpu_s)
            exchange.min_call_steps, exchange.computing_s = self._pace.min_call_steps, watch.computing_s

    def _evaluate(self) -> None:
        with self._watch.evaluating(), self._reading():
            replica, most = self._replica, MOST_EVAL_TOKENS
            loss = held_out_loss(replica.model, replica.corpus, NUM_EVAL_BATCHES, computing=replica.inner.computing, most_tokens=most)
        self._child.emit(EvalDone(self._replica.own_steps, loss, NUM_EVAL_BATCHES))
        self._exchange.measures_next = True

    def _report_state(self, state: str, reason: str) -> None:
        if (state, reason) != self._reported:
            self._reported = (state, reason)
            self._child.emit(ProcessReported(state, reason))
