"""The trainer process: one replica, stepping, and at each step boundary whatever the node asked for that needs one.

Never waits for the network: with no node at the other end of the link it trains on and takes solo steps. Messages are coded beside the
inner steps, on a second thread (coding_thread.py). Started by the supervisor as `python -m peer.trainer`; owns every tensor.
"""

from __future__ import annotations

import time

import torch

from peer.link import records as ask
from peer.link.socket import NodeLink
from peer.machine.child import Supervised
from peer.machine.events import EvalDone, ProcessSays, SoloStep
from peer.model.evaluation import held_out_loss
from peer.trainer.coding_thread import CodingThread
from peer.trainer.progress import Stopwatch
from peer.trainer.replica import Replica
from peer.trainer.saver import Saver
from protocol.errors import OperatorError
from protocol.messages.messages import RunPhase

IDLE_S = 0.05  # how long a trainer that has nothing to train waits for the node at a time
LONELY_FINISH_S = 60.0  # without a node for so long, the last averaging is given up
EVAL_INTERVAL_STEPS = 100  # inner steps between two measurements of the held-out loss
NUM_EVAL_BATCHES = 8  # behind each: enough to follow a run by; figures that are reported rest on evaluation.NUM_BATCHES
MAX_BAD_BATCHES = 10  # in a row, before the run itself must be at fault
NO_NODE = "no node to find a partner"


class Trainer:
    """Drive a replica until its run ends or the supervisor says stop."""

    def __init__(self, child: Supervised, replica: Replica, link: NodeLink, saver: Saver) -> None:
        self._child = child
        self._config = child.settings.config
        self._replica = replica
        self._node = CodingThread(link, replica.outer)
        self._saver = saver
        self._device = replica.outer.fragments[0].slow.device
        self._watch = Stopwatch(child.emit)
        self._started = saver.has_checkpoint or not child.settings.told_to_start
        self._session = 0  # of the link, at the last boundary
        self._alone_since_s = time.monotonic()  # without a node
        self._finish_done = False
        self._bad_batches = 0
        self._said = ("", "")
        replica.on_solo = lambda fragment, reason: child.emit(SoloStep(fragment, reason))

    def run(self) -> None:
        """Train to the end of the run, or until asked to stop; save before returning."""
        self._node.start()
        try:
            if self._started:
                self._start()
            else:
                self._say("ready", "")
            self._train()
            self._end()
        except OperatorError:  # raised between two steps only, so nothing is half done
            if not self._bad_batches:
                self._saver.save(self._replica)
            raise
        finally:
            self._node.close()
            self._replica.corpus.close()

    def _train(self) -> None:
        while not self._child.stop_requested() and not self._finish_done:
            if not self._started:
                self._boundary()
                self._node.wait(IDLE_S)
            elif self._replica.phase is RunPhase.FINISH:
                self._boundary()
                self._idle_at_the_end()
            else:
                with self._watch.blocked():
                    self._boundary()
                if self._replica.phase is RunPhase.TRAIN:  # a partner's clock may have ended the schedule just now
                    self._inner_step()
                self._housekeeping()

    # ------------------------------------------------------------------ the node

    def _boundary(self) -> None:
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
        self._alone_since_s = time.monotonic()
        self._node.send(ask.Built(self._replica.plan), session)
        self._tell_node()
        self._announce(self._replica.countdown.due())

    def _answer(self, request: ask.Request) -> None:
        match request:
            case ask.Start():
                self._start()
            case ask.FinishDone():
                self._finish_done = self._replica.phase is RunPhase.FINISH
            case _:
                reply = self._replica.handle(request)
                if reply is not None:
                    self._node.send(reply, self._session)
                if isinstance(reply, ask.Adopted) and reply.accepted:
                    self._saver.save(self._replica)
                    self._start()

    def _announce(self, due: list[int]) -> None:
        for fragment in due:
            if self._session:
                self._node.send(ask.Due(fragment, self._replica.phase), self._session)
            else:
                self._replica.go_alone(fragment, NO_NODE)

    def _tell_node(self, *, done: bool = False) -> None:
        self._node.send(ask.Progress(self._replica.clock_steps, self._replica.phase, self._started, done), self._session)

    def _settle(self) -> None:
        """Wait for what a GPU still does for the node, so that it counts as blocked and not as training."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # ------------------------------------------------------------------ training

    def _start(self) -> None:
        """Begin, or go on; who has begun has a checkpoint, so that a restart does not ask for the word again."""
        self._started = True
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
        due = self._replica.newly_due()
        if due:
            with self._watch.blocked():
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
        if self._watch.is_time_to_tell():
            self._watch.tell(self._replica)
            self._tell_node()
        if self._replica.own_steps % EVAL_INTERVAL_STEPS == 0:
            self._evaluate()
        if self._saver.is_due(self._replica) and not self._bad_batches:  # weights that do not work must not replace those that did
            self._saver.save(self._replica)
            self._say("training", self._saver.trouble)

    def _evaluate(self) -> None:
        loss = held_out_loss(self._replica.model, self._replica.corpus, NUM_EVAL_BATCHES)
        self._child.emit(EvalDone(self._replica.own_steps, loss, NUM_EVAL_BATCHES))

    def _say(self, state: str, reason: str) -> None:
        if (state, reason) != self._said:
            self._said = (state, reason)
            self._child.emit(ProcessSays(state, reason))

    # ------------------------------------------------------------------ the end

    def _idle_at_the_end(self) -> None:
        """The schedule has run out: answer meetings until the node says that the last averaging is over."""
        is_lonely = not self._session and time.monotonic() - self._alone_since_s > LONELY_FINISH_S
        if self._config.alone or is_lonely:
            self._finish_done = True
            return
        self._say("finishing", "the schedule has run out: averaging with the others")
        if self._watch.is_time_to_tell():
            self._watch.tell(self._replica)
            self._tell_node()
        self._node.wait(IDLE_S)

    def _end(self) -> None:
        if self._finish_done:
            self._replica.end_alone()
            self._evaluate()
        if self._started and (self._finish_done or not self._bad_batches):
            self._saver.save(self._replica)
        self._watch.tell(self._replica)
        if self._finish_done:
            self._tell_node(done=True)
