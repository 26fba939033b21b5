"""The trainer's loop: one replica, stepping, and at each step boundary whatever the node asked for that needs one.

Never waits for the network: with no node at the other end of the link it trains on and takes solo steps. Messages are coded beside the
inner steps, on a second thread (coding_thread.py).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Literal

import torch

from gossamer.peer.link import records as ask
from gossamer.peer.link.socket import TrainerEnd
from gossamer.peer.machine.child import Child
from gossamer.peer.machine.events import EvalDone, Event, OutputsMoved, ProcessSays, StepDone
from gossamer.peer.model.evaluation import held_out_loss, output_distance, predictions
from gossamer.peer.trainer.coding_thread import CodingThread
from gossamer.peer.trainer.interval import Pace
from gossamer.peer.trainer.replica import InnerStep, Replica
from gossamer.peer.trainer.saver import Saver
from gossamer.protocol.errors import OperatorError
from gossamer.protocol.messages.messages import RunPhase

TELL_S = 1.0  # between two words to the supervisor
IDLE_S = 0.05  # how long a trainer that has nothing to train waits for the node at a time
LONELY_FINISH_S = 60.0  # without a node for so long, the last averaging is given up
EVAL_INTERVAL_STEPS = 100  # inner steps between two measurements of the held-out loss
NUM_EVAL_BATCHES = 8  # behind each: enough to follow a run by; figures that are reported rest on evaluation.NUM_BATCHES...
MOST_EVAL_TOKENS = 32_768  # ...of so many tokens together at most: partners wait meanwhile, and eight large batches take three steps' time
MAX_BAD_BATCHES = 10  # in a row, before the run itself must be at fault
NO_NODE = "no node to find a partner"


class State(Enum):
    """How far a trainer is."""

    READY = auto()  # waits for the node's word
    BEGUN = auto()  # trains, or takes part in the last averaging
    OVER = auto()  # the last averaging is over


Blocker = Literal["meetings", "checkpoints"]
"""What keeps a trainer from inner steps."""


class Stopwatch:
    """Where the time of one trainer process goes, from its start: in inner steps, or blocked by synchronization between them.

    `queued_s` is a clock that goes on while the machine runs something else though we are ready: that is nobody's synchronization.
    """

    def __init__(self, emit: Callable[[Event], None], now_s: Callable[[], float], queued_s: Callable[[], float]) -> None:
        self._emit = emit
        self._now_s = now_s
        self._queued_s = queued_s
        self.train_s = 0.0
        self.blocked_s: dict[Blocker, float] = {"meetings": 0.0, "checkpoints": 0.0}  # parts of it
        self.evaluation_s = 0.0  # beside it
        self._steps: list[InnerStep] = []  # since it was told last
        self._told_s = self._now_s()
        self._start_cpu_s = time.process_time()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count the time inside as training."""
        start_s = self._now_s()
        try:
            yield
        finally:
            self.train_s += self._now_s() - start_s

    @contextlib.contextmanager
    def blocked(self, by: Blocker) -> Iterator[None]:
        """Count the time inside as blocked, and as part of training.

        What is started on a device must be finished inside, or the next inner step pays for it unseen.
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
        """Count the time inside as neither."""
        start_s = self._now_s()
        yield
        self.evaluation_s += self._now_s() - start_s

    def step(self, step: InnerStep) -> None:
        """Note an inner step."""
        self._steps.append(step)

    def is_time_to_tell(self) -> bool:
        """Return whether the last telling is old enough for another."""
        return self._now_s() - self._told_s >= TELL_S

    def tell(self, replica: Replica, coding_cpu_s: float) -> None:
        """Emit how far the trainer is; `coding_cpu_s` is what the other thread has used."""
        passed_s = max(1e-9, self._now_s() - self._told_s)
        self._told_s = self._now_s()
        so_far = replica.own_steps, replica.clock_steps, replica.tokens
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
    """Drive a replica, one `tick` at a time: `run` does it for a process, a test in its own time.

    All belongs to one thread. `now_s` is a clock that never goes back, `queued_s` one of the time for which that thread
    waits for a processor.
    """

    def __init__(
        self,
        child: Child,
        replica: Replica,
        link: TrainerEnd,
        saver: Saver,
        now_s: Callable[[], float],
        queued_s: Callable[[], float],
    ) -> None:
        self.state = State.READY
        self._child = child
        self._is_alone = child.settings.config.alone
        self._replica = replica
        self._link = link
        self._pace = Pace(replica, child.emit)
        self._node = CodingThread(link, replica.outer, self._answer_now, self._pace.hear)
        self._saver = saver
        self._now_s = now_s
        self._device = replica.inner.device
        self._watch = Stopwatch(child.emit, now_s, queued_s)
        self._session = 0  # of the link, at the last boundary
        self._node_changed_s = now_s()
        self._bad_batches = 0  # in a row, up to the last one
        self._said = ("", "")
        self._probes_next = False  # whether the next meeting is to tell how far it moves the outputs

    def run(self) -> None:
        """Train to the end of the run, or until asked to stop; save before returning."""
        try:
            self.start()
            while self.state is not State.OVER and not self._child.stop_requested():
                self._node.wait(self.tick())
            self.end()
        except OperatorError:  # raised between two steps only, so nothing is half done
            if not self._bad_batches:
                self._saver.save(self._replica)
            raise
        finally:
            self.close()

    def start(self) -> None:
        """Listen to the node, and begin to train unless its word is to be waited for."""
        self._node.start()
        if self._saver.has_checkpoint or not self._child.settings.told_to_start:
            self._begin()
        else:
            self._say("ready", "")

    def tick(self) -> float:
        """Take one turn: answer the node, make an inner step where there is one to make, tell and save what is due.

        Returns the seconds for which there is nothing to do unless the node says something. Raises OperatorError for a run that diverges or
        a text that cannot be read.
        """
        if not self._is_training:
            self.answer_node()
            if self.state is State.BEGUN and self._replica.phase is RunPhase.FINISH:
                self._finish()
            return IDLE_S
        with self._watch.blocked("meetings"):
            self.answer_node()
        if self._is_training:  # a partner's clock may have ended the schedule just now
            self._inner_step()
        self._housekeeping()
        return 0.0

    def end(self) -> None:
        """Save, and tell how it ended: at a step boundary, once."""
        is_over = self.state is State.OVER
        if is_over:
            self._replica.end_alone()
            self._evaluate()
        if self.state is not State.READY and (is_over or not self._bad_batches):
            self._saver.save(self._replica)
        self._watch.tell(self._replica, self._node.cpu_s)
        if is_over:
            self._tell_node(done=True)

    def close(self) -> None:
        """Let go of the link, the threads and the text."""
        self._node.close()
        self._saver.finish()
        self._replica.corpus.close()
        self._replica.inner.devices.close()

    @property
    def _is_training(self) -> bool:
        return self.state is State.BEGUN and self._replica.phase is RunPhase.TRAIN

    # ------------------------------------------------------------------ the node

    def answer_node(self) -> None:
        """Do what the node asked for: the part of a turn that is done even where nothing is trained."""
        batches = self._node.take()
        for batch in batches:
            if batch.session != self._session:
                self._change_node(batch.session)
            for request in batch.requests:
                self._answer(request)
        if batches:
            self._settle()

    def _change_node(self, session: int) -> None:
        """The node came, went, or is another one; whatever the former one had begun has ended."""
        self._replica.lose_node()
        self._session = session
        self._node_changed_s = self._now_s()
        self._link.send(ask.Built(self._replica.plan), session)  # a node must know of us before anything else
        self._tell_node()
        self._announce(self._replica.countdown.due())

    def _answer(self, request: ask.Request) -> None:
        match request:
            case ask.Start():
                self._begin()
            case ask.Open() if self._pace.is_too_soon(request):
                self._link.send(_too_soon(request), self._session)
            case ask.FinishDone():
                if self._replica.phase is RunPhase.FINISH:
                    self.state = State.OVER
            case _:
                if isinstance(request, ask.Apply) and self._probes_next:
                    reply = self._apply_probed(request)
                else:
                    reply = self._replica.handle(request)
                if reply is not None:
                    self._link.send(reply, self._session)
                if isinstance(request, ask.Adopt) and request.is_result:
                    self._tell_node()
                elif isinstance(reply, ask.Adopted) and reply.accepted:
                    if self._saver.has_checkpoint:
                        self._saver.begin(self._replica)
                    self._begin()

    def _apply_probed(self, request: ask.Apply) -> ask.Reply | None:
        """Apply a meeting, and tell how far that moves the outputs."""
        probe, model, dtype = self._replica.corpus.held_out_batches(1)[0][:1], self._replica.model, self._replica.inner.computing.dtype
        fragment, before = self._replica.outer.fragment_of(request.meeting), predictions(model, probe, dtype)
        reply = self._replica.handle(request)
        if fragment is not None and isinstance(reply, ask.Applied):
            self._child.emit(OutputsMoved(fragment, output_distance([before, predictions(model, probe, dtype)])))
            self._probes_next = False
        return reply

    def _answer_now(self, request: ask.BesideRequest, stream: torch.cuda.Stream | None) -> tuple[ask.Reply, ...] | None:
        """Answer in the middle of an inner step; None when it must wait for the boundary. Called by the coding thread."""
        if isinstance(request, ask.Open) and self._pace.is_too_soon(request):
            return (_too_soon(request),)
        if isinstance(request, ask.Apply) and self._probes_next:  # what it does to the outputs is measured at the boundary
            return None
        return self._replica.answer_beside(request, stream)

    def _announce(self, due: list[int]) -> None:
        for fragment in due:
            if self._session:
                self._link.send(ask.Due(fragment, self._replica.phase), self._session)
            else:
                self._replica.go_alone(fragment, NO_NODE)

    def _tell_node(self, *, done: bool = False) -> None:
        has_begun = self.state is not State.READY
        replica = self._replica
        self._link.send(ask.Progress(replica.clock_steps, replica.phase, has_begun, done, replica.tokens), self._session)

    def _settle(self) -> None:
        """Wait for what a GPU still does for the node, so that it counts as blocked and not as training."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    # ------------------------------------------------------------------ training

    def _begin(self) -> None:
        """Begin, or go on; who has begun has a checkpoint, so that a restart does not ask for the word again."""
        self.state = State.BEGUN
        if not self._saver.has_checkpoint:
            self._saver.save(self._replica)
        self._say("training", self._saver.trouble)
        self._tell_node()

    def _inner_step(self) -> None:
        try:
            with self._watch.training():
                step = self._replica.inner_step()
        except FloatingPointError as error:
            self._pass_over(error)
            return
        self._bad_batches = 0
        self._watch.step(step)
        due = [] if self._is_alone else self._replica.countdown.tick()
        if due:
            with self._watch.blocked("meetings"):
                self._announce(due)
                self._settle()

    def _pass_over(self, error: FloatingPointError) -> None:
        self._bad_batches += 1
        self._replica.skip_batch()
        if self._bad_batches >= MAX_BAD_BATCHES:
            raise OperatorError(
                f"{MAX_BAD_BATCHES} batches in a row gave no finite loss (the last: {error})",
                hint="the earlier checkpoints are untouched; lower [inner] learning_rate in the manifest, or check the text",
            )

    def _housekeeping(self) -> None:
        self._tell_if_time()
        if self._replica.own_steps % EVAL_INTERVAL_STEPS == 0:
            self._evaluate()
        self._saver.look()
        if self._saver.is_due(self._replica) and not self._bad_batches:  # weights that do not work must not replace those that did
            with self._watch.blocked("checkpoints"):
                self._saver.begin(self._replica)
        self._say("training", self._saver.trouble)

    def _finish(self) -> None:
        """The schedule has run out: only answer meetings, until the node says that the last averaging is over."""
        is_lonely = not self._session and self._now_s() - self._node_changed_s > LONELY_FINISH_S
        if self._is_alone or is_lonely:
            self.state = State.OVER
            return
        self._say("finishing", "the schedule has run out: averaging with the others")
        self._tell_if_time()

    def _tell_if_time(self) -> None:
        if self._watch.is_time_to_tell():
            self._watch.tell(self._replica, self._node.cpu_s)
            self._tell_node()
            self._pace.update(self._watch.train_s, self._watch.blocked_s["meetings"], self._node.cpu_s)

    def _evaluate(self) -> None:
        with self._watch.evaluating(), self._replica.reading():
            replica, most = self._replica, MOST_EVAL_TOKENS
            loss = held_out_loss(replica.model, replica.corpus, NUM_EVAL_BATCHES, computing=replica.inner.computing, most_tokens=most)
        self._child.emit(EvalDone(self._replica.own_steps, loss, NUM_EVAL_BATCHES))
        self._probes_next = True

    def _say(self, state: str, reason: str) -> None:
        if (state, reason) != self._said:
            self._said = (state, reason)
            self._child.emit(ProcessSays(state, reason))


def _too_soon(request: ask.Open) -> ask.Unavailable:
    return ask.Unavailable(request.meeting, "my line carries no meeting so soon after the last")
