"""One replica of the model in training: inner steps, outer loop, schedule clock, and all that a checkpoint must hold.

It acts when it is called and knows no time: peer/trainer/trainer.py drives it. Everything random follows from (run seed, peer id, step),
so a replica restored from its state goes on bit for bit on the CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gossamer.optim.fragments import Countdown
from gossamer.optim.inner import learning_rate
from gossamer.optim.noloco import NoLoCo
from gossamer.peer.link import records as ask
from gossamer.peer.link.payload_folder import PayloadFolder, mapped
from gossamer.peer.machine.events import Event, SoloStep
from gossamer.peer.model.computing import Computing
from gossamer.peer.model.evaluation import held_out_loss
from gossamer.peer.model.plan import follow_clock, fragment_codecs, inner_settings, model_plan
from gossamer.peer.text.corpus import Corpus
from gossamer.peer.trainer.device import Devices
from gossamer.peer.trainer.fragment_state import behind, mark
from gossamer.peer.trainer.inner_loop import InnerLoop
from gossamer.peer.trainer.outer_loop import OuterLoop
from gossamer.peer.trainer.shared_state import RESULT_TOLERANCE, TOLERANCE, read_state, settle, try_on, try_shifts
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.terms import ModelPlan
from gossamer.protocol.run.manifest import Manifest

REPLACED: Final = ("slow/", "momentum/")  # in the names of `Replica.tensors`: what an outer step replaces and nothing changes
LATE_SHARE: Final = 10  # of the gap that may be between two clocks: a tenth without an outer step is too much for who joins
INNER: Final = "inner/"  # likewise: what the optimizer keeps
JUDGE_BATCHES: Final = 4  # of held-out text, by which weights of others are compared with our own...
JUDGE_TOKENS: Final = 8192  # ...of so many tokens together at most: the trainer stands still meanwhile, for each fragment that is pulled


@dataclass(frozen=True, slots=True)
class InnerStep:
    """What one inner step did."""

    loss: float  # nats per token
    learning_rate: float
    num_tokens: int


class Replica:
    """A model in training. The model's tensors are written to.

    Everything belongs to one thread, but what a second one may call of `outer` (see `OuterLoop`).
    """

    def __init__(
        self,
        manifest: Manifest,
        model: PreTrainedModel,
        corpus: Corpus,
        payloads: PayloadFolder,
        peer_seed: int,
        emit: Callable[[Event], None],
        computing: Computing = Computing(),  # noqa: B008 - frozen
        devices: Devices | None = None,  # None: the one where the model is
    ) -> None:
        self.manifest = manifest
        self.model = model
        self.clock_steps = 0
        self.own_steps = 0
        self.tokens = 0
        self.corpus = corpus
        self.payloads = payloads
        self._joined = (0, 0)  # clock and own steps when weights were last taken over from a donor
        self._is_founder = True
        self._seed = peer_seed
        self._emit = emit
        self._changing = threading.Lock()  # held by the trainer's thread whenever weights or meetings may change
        self._changing.acquire()
        self._still: torch.cuda.Event | None = None  # when the weights that are only read now stand still: a GPU may be behind
        self._solo_later: set[int] = set()  # fragments to go solo when their meeting has come to nothing
        self._settings = inner_settings(manifest)
        self.inner = InnerLoop(manifest, model, corpus, computing, emit, devices)
        self.parameters = self.inner.parameters
        codecs = fragment_codecs(manifest, {name: tuple(p.shape) for name, p in self.parameters.items()})
        rule = NoLoCo(manifest.outer.alpha, manifest.outer.beta, manifest.outer.gamma)
        self.outer = OuterLoop(codecs, self.parameters, rule, payloads, self._on_outer_step)
        self.countdown = Countdown(len(codecs), manifest.outer.nominal_steps, peer_seed)

    @property
    def phase(self) -> RunPhase:
        """TRAIN until the schedule clock has run out."""
        return RunPhase.TRAIN if self.clock_steps < self.manifest.run.total_steps else RunPhase.FINISH

    @property
    def plan(self) -> ModelPlan:
        """What model and codec imply for the wire."""
        return model_plan([fragment.codec for fragment in self.outer.fragments], self.manifest.outer.alpha)

    def inner_step(self) -> InnerStep:
        """Train on this peer's next batch.

        Raises FloatingPointError, with no weight changed, when the loss or a gradient is not finite; and as InnerLoop.gradient.
        """
        rate = learning_rate(self.clock_steps, self.steps_since_join(), self._settings)
        try:
            with self._beside():
                loss, norm, num_tokens = self.inner.gradient(self.own_steps, step_seed(self._seed, self.own_steps))
                is_finite = bool(torch.isfinite(norm + loss))  # waits for a GPU
            if not is_finite:
                raise FloatingPointError(f"inner step {self.own_steps}: loss {float(loss)}, gradient norm {float(norm)}")
            self.inner.step(rate)
        finally:
            self.outer.move()  # by what was decided meanwhile
        self.own_steps += 1
        self.clock_steps = min(self.clock_steps + 1, self.manifest.run.total_steps)  # a partner's may have ended the schedule meanwhile
        self.tokens += num_tokens
        self.outer.count(num_tokens)
        return InnerStep(float(loss), rate, num_tokens)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Let a second thread answer the node inside; what it decides moves the model later."""
        self._still = mark(self.inner.device)
        self._changing.release()
        try:
            yield
        finally:
            self._changing.acquire()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Let a second thread answer the node while the weights of a step boundary are read inside."""
        try:
            with self._beside():
                yield
        finally:
            self.outer.move()

    def answer_beside(self, request: ask.BesideRequest, stream: torch.cuda.Stream | None = None) -> tuple[ask.Reply, ...] | None:
        """Carry out a request while the weights are only read, and return its replies, none or one. For a second thread.

        None at any other time: then the next step boundary is near. On a GPU its own `stream` computes, and is waited for.
        """
        if not self._changing.acquire(blocking=False):
            return None
        try:
            with behind(self._still, stream):
                reply = self._carry_out_beside(request)
            return () if reply is None else (reply,)
        finally:
            self._changing.release()

    def skip_batch(self) -> None:
        """Pass over the next batch: it made the loss not finite."""
        self.own_steps += 1

    def handle(self, request: ask.Request) -> ask.Reply | None:
        """Carry out a request of the node; call at a step boundary. Start and FinishDone are the trainer's own affair."""
        reply = self._carry_out(request)
        self.outer.move()
        return reply

    def _carry_out(self, request: ask.Request) -> ask.Reply | None:
        match request:
            case ask.CopyState() | ask.SketchSlow() | ask.CodeSlow() | ask.DecodeSlow():
                return self.outer.write(request)
            case ask.Pull():
                return self._pull(request)
            case ask.BringUp(name):
                self._bring_up()
                return ask.Written(name, "")
            case ask.Settle():
                self.end_alone()
                settle(self.outer.fragments, self.parameters)
                return self.outer.write(ask.CopyState(request.name))
            case ask.Adopt():
                return self._adopt(request)
            case ask.StepBack(clock_steps):
                self.clock_steps = min(self.clock_steps, clock_steps)
            case ask.NodeReport() | ask.Start() | ask.FinishDone():
                return None
            case _:
                return self._carry_out_beside(request)
        return None

    def _carry_out_beside(self, request: ask.BesideRequest) -> ask.Reply | None:
        match request:
            case ask.Drop(meeting):
                self._drop(meeting)
            case ask.Solo(fragment):
                self._solo_if_due(fragment)
            case ask.Defer(fragment):
                if fragment in self.countdown.due():
                    self.countdown.reset(fragment)
            case _:
                return self.outer.answer(request, self.clock_steps, self.phase)
        return None

    def lose_node(self) -> None:
        """The node is gone, and with it all that it had begun: drop every meeting."""
        self.outer.drop_all()
        self._solo_later.clear()

    def go_alone(self, fragment: int, reason: str) -> None:
        """Settle a due fragment without a partner: a solo step, or none where the run says to wait for partners."""
        if self.manifest.outer.no_partner == "defer":
            self.countdown.reset(fragment)
        else:
            self._solo(fragment, reason)
            self.outer.move()

    def end_alone(self) -> None:
        """Take the last averaging's step alone, whatever is open: slow weights become the fast ones."""
        self.lose_node()
        for fragment in range(len(self.outer.fragments)):
            self.outer.solo(fragment, RunPhase.FINISH)
        self.outer.move()

    def _solo(self, fragment: int, reason: str) -> None:
        if self.outer.solo(fragment, self.phase):
            self._emit(SoloStep(fragment, reason))
        else:
            self._solo_later.add(fragment)

    def _solo_if_due(self, fragment: int) -> None:
        if fragment in self.countdown.due():
            self._solo(fragment, "no partner answered in time")

    def _drop(self, meeting: int) -> None:
        fragment = self.outer.drop(meeting)
        if fragment in self._solo_later:
            self._solo_if_due(fragment)

    def _on_outer_step(self, fragment: int, partner_clock_steps: int) -> None:
        self._solo_later.discard(fragment)
        self.countdown.reset(fragment, self.outer.fragments[fragment].since.steps)  # what was made in flight counts
        joined_clock, joined_steps = self._joined
        since = follow_clock(
            self.clock_steps - joined_clock,
            partner_clock_steps - joined_clock,
            self.manifest.outer.nominal_steps,
            self.own_steps - joined_steps,
            self.manifest.run.total_steps - joined_clock,
        )
        self.outer.miss(joined_clock + since - self.clock_steps)
        self.clock_steps = joined_clock + since

    def steps_since_join(self) -> int:
        """Return how many steps the learning rate has had to warm up: own ones since the weights were taken over, all of a founder's."""
        return self.clock_steps if self._is_founder else self.own_steps - self._joined[1]

    # ------------------------------------------------------------------ taking over another peer's state

    def _adopt(self, request: ask.Adopt) -> ask.Adopted:
        """Take over what others gave us, or leave all as it is: never what has fewer steps behind it, or predicts our text worse.

        In the last case ours is as far as theirs, whatever its clock says; so we take over the clock alone and can meet them again.
        """
        total_steps = self.manifest.run.total_steps
        clock_steps = total_steps if request.is_result else min(request.clock_steps, total_steps)
        if self.own_steps and clock_steps <= self.clock_steps and not request.is_result:
            return ask.Adopted(request.name, False, f"{clock_steps} steps are behind it, {self.clock_steps} behind our own weights")
        try:
            parts = read_state(mapped(Path(request.name)), self.outer.fragments, self.outer.has_momentum)
        except ValueError as error:
            return ask.Adopted(request.name, False, str(error), is_sound=False)
        tolerance = RESULT_TOLERANCE if request.is_result else TOLERANCE
        reason = try_on(parts, self.parameters, self._judged_loss, tolerance)
        if reason:
            if request.is_result:
                return ask.Adopted(request.name, False, reason)
            if self.own_steps:
                self.outer.miss(clock_steps - self.clock_steps)
                self.clock_steps = clock_steps
            return ask.Adopted(request.name, self.own_steps > 0, reason)
        self.lose_node()
        for part in parts:
            part.fragment.replace(part.slow, part.momentum)
        self.inner.devices.forget()
        self.clock_steps = clock_steps
        self._is_founder = False
        self._joined = (self.clock_steps, self.own_steps)
        return ask.Adopted(request.name, True, "")

    def _judged_loss(self) -> float:
        return held_out_loss(self.model, self.corpus, JUDGE_BATCHES, computing=self.inner.computing, most_tokens=JUDGE_TOKENS)

    def _bring_up(self) -> None:
        """Who joins gets slow weights: what has waited long for a partner is far behind what it has learnt."""
        for fragment in self.countdown.due():
            if self.outer.fragments[fragment].since.steps > self.manifest.outer.max_clock_gap_steps // LATE_SHARE:
                self._solo(fragment, "somebody joins with these weights")

    def _pull(self, request: ask.Pull) -> ask.Pulled:
        """Move fragments to where others' were, what they have learnt since their last outer step on top; not where that predicts worse."""
        donors = [[shift for shift in self.outer.pulls.take(names) if shift.fragment.meeting is None] for names in request.donors]
        moved, reason = try_shifts(list(filter(None, donors)), self.parameters, self._judged_loss)
        for shift in moved:
            fragment = shift.fragment
            fragment.slow = fragment.at_rest(fragment.here(fragment.slow) + fragment.here(shift.values))
        if moved:
            self.clock_steps = max(self.clock_steps, min(request.clock_steps, self.manifest.run.total_steps))
        return ask.Pulled(request.name, {shift.name: shift.failed_share for shift in moved}, reason)

    # ------------------------------------------------------------------ checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the replica by name; live ones, those that another rank's optimizer keeps excepted."""
        tensors = {f"fast/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for index, fragment in enumerate(self.outer.fragments):
            tensors[f"slow/{index}"] = fragment.slow
            if fragment.has_momentum:
                tensors[f"momentum/{index}"] = fragment.momentum
        for name, value in self.inner.devices.state().items():
            tensors[f"{INNER}{name}"] = value
        return tensors

    def changes(self, name: str) -> bool:
        """Tell whether the next step changes one of `tensors` where it lies."""
        kept = name.removeprefix(INNER)
        return not name.startswith(REPLACED) and (kept == name or kept.split("/", 1)[1] in self.inner.devices.moved)

    def state(self) -> dict[str, Any]:
        """Return all else that a checkpoint must hold, JSON-able."""
        return {
            "clock_steps": self.clock_steps,
            "own_steps": self.own_steps,
            "tokens": self.tokens,
            "joined": list(self._joined),
            "is_founder": self._is_founder,
            "countdown": self.countdown.state(),
            "outer": self.outer.state(),
            "corpus": self.corpus.cursor(),
        }

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Take over what `tensors` and `state` returned. Raises KeyError or ValueError for a checkpoint of another model."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"fast/{name}"])
        for index, fragment in enumerate(self.outer.fragments):
            fragment.slow.copy_(tensors[f"slow/{index}"])
            if fragment.has_momentum:
                fragment.momentum.copy_(tensors[f"momentum/{index}"])
        self.inner.devices.restore({name.removeprefix(INNER): value for name, value in tensors.items() if name.startswith(INNER)})
        self.clock_steps, self.own_steps, self.tokens = state["clock_steps"], state["own_steps"], state["tokens"]
        self._joined = (state["joined"][0], state["joined"][1])
        self._is_founder = state["is_founder"]
        self.countdown.restore(state["countdown"])
        self.outer.restore(state["outer"])
        self.corpus.restore(state["corpus"])
        self.inner.forget_batch()


def step_seed(peer_seed: int, own_steps: int) -> int:
    """Derive the seed of what is drawn at random in one inner step."""
    return int.from_bytes(hashlib.sha256(f"{peer_seed}/{own_steps}".encode()).digest()[:8], "little") >> 1
