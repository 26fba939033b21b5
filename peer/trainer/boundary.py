"""What happens between two inner steps of any program: meetings, the clock, checkpoints and reports. The program makes the steps.

It never waits for the network: with no node at the other end of the link the program trains on and takes solo steps. Meetings need weights
that nobody changes: how the two windows for that work, and which thread does what: exchange.py.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Protocol

from torch import Tensor

from gossamer.peer.link import messages
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import TrainerEnd
from gossamer.peer.machine.child import ChildSettings
from gossamer.peer.machine.events import EvalDone, Event, ProcessReported, ProgressMade, Warned
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.processor_queue import queued_clock
from gossamer.peer.machine.units import bytes_text, percent_text
from gossamer.peer.model.checkpoint import load_latest
from gossamer.peer.trainer.exchange import TrainerExchange
from gossamer.peer.trainer.interval import Pace
from gossamer.peer.trainer.losses import EVAL_INTERVAL_STEPS, MEASURE_TOPIC, Losses, MeasureFailed
from gossamer.peer.trainer.replica import Replica
from gossamer.peer.trainer.saver import Saver
from gossamer.peer.trainer.stopwatch import InnerStep, Stopwatch
from gossamer.protocol.errors import OperatorError
from gossamer.protocol.messages.messages import RunPhase

REPORT_S = 1.0  # between two reports on a long work
IDLE_S = 0.05  # how long a program with nothing to train waits for the node at a time
LONELY_FINISH_S = 60.0  # after so long without a node the last averaging is given up
NEVER_WORST = Losses((-math.inf,))
MAX_BAD_BATCHES = 10  # in a row, before training stops: the run diverges


class State(Enum):
    """The trainer's lifecycle state."""

    READY = auto()  # waits for the node's Start
    BEGUN = auto()  # trains, or takes part in the last averaging
    OVER = auto()  # the last averaging is over


class Supervision(Protocol):
    """The supervisor's side of a trainer's pipes."""

    @property
    def settings(self) -> ChildSettings:
        """The newest settings."""

    def emit(self, event: Event) -> None:
        """Send an event; from any thread."""

    def stop_requested(self) -> bool:
        """Return whether the supervisor asked for a stop or has ended."""


class Boundary:
    """Drives a replica between the steps of its program. Belongs to the program's thread, which holds the weights unless it is `reading`.

    `now_s` is a monotonic clock; `queued_s` returns for how long that thread has waited for a processor.
    """

    def __init__(
        self,
        supervision: Supervision,
        replica: Replica,
        exchange: TrainerExchange,
        saver: Saver,
        now_s: Callable[[], float],
        queued_s: Callable[[], float],
    ) -> None:
        self.state = State.READY
        self.replica = replica
        self.watch = Stopwatch(supervision.emit, now_s, queued_s)
        self.bad_batches = 0  # in a row, up to the last one
        self._supervision = supervision
        self._is_alone = supervision.settings.config.alone
        self._exchange = exchange
        self._pace = Pace(replica, supervision.emit)
        self._saver = saver
        self._now_s = now_s
        self._node_seen_s = now_s()
        self._reported = ("", "")
        self._warned = ""
        self._has_device_losses = False  # since the last report
        self.on_adopted: Callable[[], None] = lambda: None  # called between two steps, when the weights are other peers' now

    @property
    def is_training(self) -> bool:
        """Whether the program is to make another step."""
        return self.state is State.BEGUN and self.replica.phase is RunPhase.TRAIN

    def start(self) -> None:
        """Listen to the node, and begin to train unless the node must say so first."""
        self._exchange.start()
        if self._saver.has_checkpoint or not self._supervision.settings.waits_for_start:
            self._begin()
        else:
            self._report_state("ready", "")

    def answer(self) -> None:
        """Carry out what the node asks for: the part of a boundary that is done even where nothing is trained."""
        with self._blocked_if(self.is_training and self._exchange.has_news.is_set()):
            for request in self._exchange.at_boundary():
                match request:
                    case messages.Start():
                        self._begin()
                    case messages.FinishDone():
                        if self.replica.phase is RunPhase.FINISH:
                            self.state = State.OVER
                    case messages.WriteResult() | messages.Adopt():  # the run may be over for the others before this one was restarted
                        if self.replica.phase is RunPhase.FINISH:
                            self._saver.save(self.replica)
                    case messages.Adopted(reason=reason):
                        if self._saver.has_checkpoint:
                            self._saver.begin(self.replica, self._reading_at_boundary())
                        self._begin()
                        if not reason:  # else only the clock was taken over
                            self.on_adopted()
            if self._exchange.has_node:
                self._node_seen_s = self._now_s()

    def idle(self) -> None:
        """Take one turn in which nothing is trained: before the start, or in the last averaging."""
        if self.state is State.BEGUN and self.replica.brought is None:
            self.replica.brought = NEVER_WORST
            with self.watch.evaluating(), self._warning():
                self.replica.brought = self.replica.program.losses()
        self.answer()
        if self.state is State.BEGUN and self.replica.phase is RunPhase.FINISH:
            self._finish()

    def wait(self, seconds: float = IDLE_S) -> None:
        """Wait until a request waits for the boundary, for at most `seconds`: only where there is nothing to train."""
        self._exchange.has_news.wait(seconds)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Answer the node while the code inside only reads the weights; they move by what was decided at `Replica.move_fast_weights`."""
        return self._exchange.while_weights_are_read()

    def ending_to_read(self) -> contextlib.AbstractContextManager[None]:
        """Count the time inside, in which the program waits for the end of `reading`, as blocked."""
        return self._blocked_if(self._exchange.holds_weights)

    def move(self) -> None:
        """Move the model's weights by what meetings have decided while others read them: after an optimizer step."""
        with self._blocked_if(self.replica.owes_move):
            self.replica.move_fast_weights()

    def _blocked_if(self, works: bool) -> contextlib.AbstractContextManager[None]:
        """Count the time inside as blocked if there is work. What a boundary without any costs must not make meetings rarer."""
        return self.watch.blocked("meetings") if works else contextlib.nullcontext()

    def after_step(self, step: InnerStep) -> None:
        """Call partners for fragments that are due after an inner step that the replica has counted; report and save what is due."""
        if not isinstance(step.loss, Tensor):  # one on a device is read at the next report
            self._note_loss(0.0 if step.loss is None else step.loss)
        self._has_device_losses |= isinstance(step.loss, Tensor)
        self.watch.step(step)
        self._exchange.computing_s = self.watch.computing_s
        due = [] if self._is_alone else self.replica.countdown.tick()
        if due:
            with self.watch.blocked("meetings"):
                self._exchange.announce(due)
        self._report_and_save()

    def skip_step(self, error: FloatingPointError) -> None:
        """Pass over a batch without a finite loss, no weight changed. Raises OperatorError for a run that diverges."""
        self.replica.skip_step()
        self._note_loss(math.nan, str(error))
        self._report_and_save()

    def _note_loss(self, loss: float, words: str = "") -> None:
        """Count losses in a row that are not finite: nothing is saved meanwhile. Raises OperatorError for a run that diverges."""
        if math.isfinite(loss):
            self.bad_batches = 0
            return
        self.bad_batches += 1
        if self.bad_batches >= MAX_BAD_BATCHES:
            raise OperatorError(
                f"{MAX_BAD_BATCHES} batches in a row gave no finite loss (the last: {words or loss})",
                hint="the earlier checkpoints are untouched; lower the learning rate, or check the data",
            )

    def end(self) -> None:
        """Save, and report how it ended: at a step boundary, once."""
        is_over = self.state is State.OVER
        if is_over:
            self._exchange.take_last_solo_steps()
            self._evaluate()
        if is_over or not self.bad_batches:
            self.save()
        self.watch.notify(self.replica, self._exchange.cpu_s)
        if is_over:
            self._exchange.send_progress(done=True)

    def save(self) -> None:
        """Write a checkpoint, and wait for it: between two steps. A trainer that has not begun has nothing to save."""
        if self.state is not State.READY:
            self.replica.move_fast_weights()  # by meetings that were decided while a program only read the weights
            self._saver.save(self.replica)

    def drop_meetings(self) -> None:
        """Forget all that the node has begun: the weights become others."""
        self._exchange.drop_all()

    def close(self) -> None:
        """Close the link and the threads."""
        self._exchange.close()
        self._saver.finish()
        self.replica.program.close()

    @contextlib.contextmanager
    def _reading_at_boundary(self) -> Iterator[None]:
        """As `reading`, between two steps: afterwards the model moves by what was decided."""
        with self._exchange.while_weights_are_read():
            yield
        self.replica.move_fast_weights()

    def _begin(self) -> None:
        """Begin, or go on, with a checkpoint: a restarted trainer that has one need not wait for the node's Start."""
        self.state, self._exchange.has_begun = State.BEGUN, True
        if not self._saver.has_checkpoint:
            self._saver.save(self.replica)
        self._report_state("training", self._saver.trouble)
        self._exchange.send_progress()

    def _report_and_save(self) -> None:
        self.report_if_time()
        if self.replica.own_steps % EVAL_INTERVAL_STEPS == 0:
            self._evaluate()
        self._saver.look()
        if self._saver.is_due(self.replica) and not self.bad_batches:  # weights that do not work must not replace those that did
            with self.watch.blocked("checkpoints"):
                self._saver.begin(self.replica, self._reading_at_boundary())
        self._report_state("training", self._saver.trouble)

    def _finish(self) -> None:
        """The schedule has ended: only answer meetings, until the node reports the end of the last averaging."""
        is_lonely = self._now_s() - self._node_seen_s > LONELY_FINISH_S
        if self._is_alone or is_lonely:
            self.state = State.OVER
            return
        self._report_state("finishing", "all steps of the run are made: averaging with the others")
        self.report_if_time()

    def report_if_time(self) -> None:
        """Report the progress about once a second."""
        if self.watch.is_time_to_report():
            exchange, watch = self._exchange, self.watch
            loss = watch.notify(self.replica, exchange.cpu_s)
            if self._has_device_losses:
                self._has_device_losses = False
                self._note_loss(loss)
            exchange.send_progress()
            blocked_s = watch.blocked_s["meetings"] - exchange.probe_cost.blocking_s
            self._pace.update(exchange.report, watch.train_s, blocked_s, exchange.cpu_s, watch.starved_s)
            exchange.min_call_steps = self._pace.min_call_steps

    def _evaluate(self) -> None:
        with self.watch.evaluating(), self._reading_at_boundary(), self._warning():
            if (measured := self.replica.program.evaluation()) is not None:
                self._supervision.emit(EvalDone(self.replica.own_steps, *measured))
                self._exchange.measures_next = True

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Report a measurement that fails, and go on training."""
        try:
            yield
        except MeasureFailed as error:
            self._warn(str(error))
        else:
            self._warn("")

    def _warn(self, words: str) -> None:
        if words != self._warned or self._exchange.has_warned:
            self._warned, self._exchange.has_warned = words, False
            self._supervision.emit(Warned(MEASURE_TOPIC, words))

    def _report_state(self, state: str, reason: str) -> None:
        if (state, reason) != self._reported:
            self._reported = (state, reason)
            self._supervision.emit(ProcessReported(state, reason))


class WorkProgress:
    """Reports the progress of a long work about once a second: tokenizing a large text or reading a large checkpoint takes minutes."""

    def __init__(self, emit: Callable[[Event], None], work: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._emit = emit
        self._work = work
        self._now_s = now_s
        self._began_s = self._reported_s = now_s()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Report the progress, in bytes."""
        now_s = self._now_s()
        if now_s - self._reported_s < REPORT_S:
            return
        self._reported_s = now_s
        share = min(1.0, done_bytes / max(1, total_bytes))
        left_s = (now_s - self._began_s) * (1 - share) / max(share, 1e-9)
        words = f"{self._work}: {percent_text(share)} of {bytes_text(total_bytes)}, {max(1.0, left_s):.0f} s left"
        self._emit(ProcessReported("starting", words))
        self._emit(ProgressMade(self._work, share))


def open_boundary(
    supervision: Supervision,
    home: Home,
    replica: Replica,
    link: TrainerEnd | None = None,
    exchange_of: Callable[[TrainerEnd, PayloadFolder, Replica, Callable[[Event], None], random.Random], TrainerExchange] = TrainerExchange,
) -> Boundary:
    """Restore a replica from its newest checkpoint, if there is one, and open its end of the link to the node, unless it is open."""
    settings, emit = supervision.settings, supervision.emit
    saver = Saver(home, settings.config, emit, time.monotonic)
    loaded = load_latest(home.checkpoints, replica.manifest.run_id, WorkProgress(emit, "reading the checkpoint"))
    if loaded is not None:
        saver.restore(replica, loaded)
    payloads = PayloadFolder(settings.runtime / "payloads")
    exchange = exchange_of(link or TrainerEnd(settings.runtime), payloads, replica, emit, random.SystemRandom())
    return Boundary(supervision, replica, exchange, saver, time.monotonic, queued_clock())
