"""The trainer process: one replica, stepping, and at each step boundary whatever the node asked for.

Never waits for the network: with no node at the other end of the link it trains on and takes solo steps. Started by the supervisor as
`python -m peer.trainer`; owns every tensor.
"""

from __future__ import annotations

import hashlib
import sys
import time
import traceback

import torch

from peer import requests as ask
from peer.checkpoint import load_latest
from peer.child import Child
from peer.data import load_corpus
from peer.evaluation import held_out_loss
from peer.events import EvalDone, EventLog
from peer.home import Home
from peer.link import TrainerEnd
from peer.model import build_model, check_fit, choose_device
from peer.payloads import PayloadFolder
from peer.replica import Replica
from peer.requests import Stage
from peer.saving import Saver
from peer.stopwatch import Stopwatch
from peer.tokenizer import load_tokenizer
from peer.windows import Draw
from protocol.errors import OperatorError
from protocol.identity import Identity
from protocol.manifest import SignedManifest

IDLE_S = 0.05  # how long a trainer that has nothing to train waits for the node at a time
LONELY_FINISH_S = 60.0  # without a node for so long, the last averaging is given up
MAX_BAD_BATCHES = 10  # in a row, before the run itself must be at fault


class Trainer:
    """Drive a replica until its run ends or the supervisor says stop."""

    def __init__(self, child: Child, replica: Replica, link: TrainerEnd, saver: Saver, events: EventLog) -> None:
        self._child = child
        self._config = child.settings.config
        self._replica = replica
        self._link = link
        self._saver = saver
        self._events = events
        self._watch = Stopwatch(events, child.report)
        self._was_connected = False
        self._started = replica.own_steps > 0 or not child.settings.told_to_start
        self._finish_done = False
        self._bad_batches = 0

    def run(self) -> None:
        """Train to the end of the run, or until asked to stop; save before returning."""
        if self._started:
            self._start()
        while not self._child.stop_requested() and not self._finish_done:
            self._boundary()
            if not self._started:
                self._link.wait(IDLE_S)
            elif self._replica.stage is Stage.FINISH:
                self._idle_at_the_end()
            else:
                self._inner_step()
                self._housekeeping()
        if self._finish_done:
            self._finish()
        if self._started:
            self._saver.save(self._replica)
        self._watch.report(self._replica)
        self._tell_node(done=True)
        self._link.close()

    def _boundary(self) -> None:
        with self._watch.blocked():
            requests = self._link.poll()
            if self._was_connected and not self._link.connected:
                self._replica.outer.drop_all()
                self._go_solo(self._replica.countdown.due())
            if self._link.connected and not self._was_connected:
                self._tell_node()
                self._announce(self._replica.countdown.due())
            self._was_connected = self._link.connected
            for request in requests:
                self._answer(request)

    def _answer(self, request: ask.Request) -> None:
        match request:
            case ask.Start():
                self._start()
            case ask.FinishDone():
                self._finish_done = self._replica.stage is Stage.FINISH
            case _:
                reply = self._replica.handle(request)
                if reply is not None:
                    self._link.send(reply)
        if isinstance(request, ask.Adopt):
            self._start()
        self._watch.count(request)

    def _start(self) -> None:
        self._started = True
        self._child.report("trainer", {"state": "training", "reason": ""})
        self._tell_node()

    def _inner_step(self) -> None:
        try:
            with self._watch.training():
                step = self._replica.inner_step()
        except FloatingPointError as error:
            self._pass_over(error)
            return
        self._bad_batches = 0
        self._watch.step(self._replica, step)
        due = self._replica.newly_due()
        if due:
            with self._watch.blocked():
                self._announce(due)

    def _announce(self, due: list[int]) -> None:
        if not self._link.connected:
            self._go_solo(due)
            return
        for fragment in due:
            self._link.send(ask.Due(fragment, self._replica.stage))

    def _go_solo(self, due: list[int]) -> None:
        """Take outer steps without a node to ask: alone, or not at all where the run says to wait for partners."""
        for fragment in due:
            if self._replica.manifest.outer.no_partner == "defer":
                self._replica.countdown.reset(fragment)
            else:
                self._replica.outer.solo(fragment, self._replica.stage)
                self._watch.solo(fragment, "no node to find a partner")

    def _pass_over(self, error: FloatingPointError) -> None:
        self._bad_batches += 1
        if self._bad_batches >= MAX_BAD_BATCHES:
            raise OperatorError(
                f"{MAX_BAD_BATCHES} batches in a row gave no finite loss ({error})",
                hint="the weights before them are saved; lower [inner] learning_rate in the manifest, or check the text",
            )
        self._replica.skip_batch()

    def _housekeeping(self) -> None:
        if self._watch.is_time_to_tell():
            self._watch.report(self._replica)
            self._tell_node()
        if self._replica.own_steps % self._config.eval_interval_steps == 0:
            self._evaluate()
        self._saver.save_if_due(self._replica)

    def _tell_node(self, *, done: bool = False) -> None:
        self._link.send(ask.Progress(self._replica.clock_steps, self._replica.stage, self._started, done))

    def _evaluate(self) -> None:
        loss = held_out_loss(self._replica.model, self._saver.corpus, self._config.num_eval_batches)
        self._events.append(EvalDone(self._replica.own_steps, loss, self._config.num_eval_batches))
        self._child.report("trainer", {"eval_loss": loss})

    def _idle_at_the_end(self) -> None:
        """The schedule has run out: answer meetings until the node says that the last averaging is over."""
        if self._watch.is_time_to_tell():
            self._watch.report(self._replica)
            self._tell_node()
        if self._link.connected:
            self._watch.saw_node()
        if self._config.alone or self._watch.seconds_without_node() > LONELY_FINISH_S:
            self._finish_done = True
        else:
            self._link.wait(IDLE_S)

    def _finish(self) -> None:
        self._replica.outer.drop_all()
        for fragment in range(len(self._replica.outer.fragments)):
            self._replica.outer.solo(fragment, Stage.FINISH)
        self._evaluate()
        self._child.report("trainer", {"finished": True})


def peer_seed(run_seed: int, identity: Identity) -> int:
    """Derive this peer's own seed, for its countdown, from the run's."""
    return int.from_bytes(hashlib.sha256(run_seed.to_bytes(8, "little") + identity.peer_id.raw).digest()[:6], "little")


def build(child: Child) -> Trainer:
    """Put the trainer together: manifest, text, model, checkpoint."""
    config = child.settings.config
    home = Home(config.home)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    manifest = SignedManifest.from_bytes(home.manifest.read_bytes()).manifest()
    identity = Identity.load_or_create(home.identity)
    events = EventLog(home.events)
    device, _ = choose_device(config.device)
    tokenizer = load_tokenizer(manifest.tokenizer.name)
    model = build_model(manifest.model, manifest.run.seed)
    check_fit(model.config, tokenizer.vocab_size, manifest.inner.sequence_length)
    inner = manifest.inner
    draw = Draw(manifest.run.seed, identity.peer_id.raw, inner.batch_size, inner.sequence_length)
    corpus = load_corpus(manifest.data, tokenizer, draw, config.data, home.cache)
    payloads = PayloadFolder(child.settings.runtime / "payloads")
    payloads.clear()
    replica = Replica(manifest, model.to(device), corpus, payloads, peer_seed(manifest.run.seed, identity))
    replica.alone = config.alone
    saver = Saver(home, config, corpus, events)
    loaded = load_latest(home.checkpoints, manifest.run_id)
    if loaded is not None:
        saver.restore(replica, loaded)
    return Trainer(child, replica, TrainerEnd(child.settings.runtime), saver, events)


def main() -> int:
    """Run the trainer process."""
    child = Child()
    try:
        started_s = time.monotonic()
        trainer = build(child)
        child.report("trainer", {"build_seconds": time.monotonic() - started_s})
        trainer.run()
        return 0
    except Exception as error:
        traceback.print_exc()
        return child.fail(error)


if __name__ == "__main__":
    sys.exit(main())
