"""One replica of the model in training: fast and slow weights, step counters, and everything that a checkpoint holds.

All randomness follows from (run seed, peer id, step), so a restored replica continues bit for bit on the CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gossamer.optim.fragments import Countdown
from gossamer.optim.inner import learning_rate
from gossamer.optim.noloco import FINISH, NoLoCo
from gossamer.peer.machine.events import Event
from gossamer.peer.model.computing import Computing
from gossamer.peer.model.plan import clock_budget, fragment_codecs, inner_settings, model_plan
from gossamer.peer.text.corpus import Corpus
from gossamer.peer.trainer.fragment_state import FragmentState, FragmentWeights, Since
from gossamer.peer.trainer.inner_loop import InnerLoop
from gossamer.peer.trainer.probe import ProbeGate
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.terms import ModelPlan
from gossamer.protocol.newest import keep_newest
from gossamer.protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from gossamer.peer.trainer.ranks import Ranks

REPLACED: Final = ("slow/", "momentum/")  # in the names of `Replica.tensors`: an outer step replaces these and never writes to them
INNER: Final = "inner/"  # likewise: the optimizer's state
JOURNALED: Final = 256  # applied meetings that are remembered; the node never asks for an older one again
ALONE: Final = nullcontext()


@dataclass(frozen=True, slots=True)
class InnerStep:
    """What one inner step did."""

    loss: float  # nats per token
    learning_rate: float
    num_tokens: int


class Replica:
    """A model in training. The model's tensors are written to. Not thread-safe: exchange.py says which thread may call it, and when."""

    def __init__(
        self,
        manifest: Manifest,
        model: PreTrainedModel,
        corpus: Corpus,
        peer_seed: int,
        emit: Callable[[Event], None],
        computing: Computing = Computing(),  # noqa: B008 - frozen
        devices: Ranks | None = None,  # None: the one where the model is
    ) -> None:
        self.manifest = manifest
        self.model = model
        self.corpus = corpus
        self.global_step = 0  # the global step, as far as this peer knows it
        self.own_steps = 0
        self.tokens = 0
        self.brought_loss: float | None = None  # on held-out text, of what this peer brought to the last averaging
        self.applied: dict[str, None] = {}  # the ids of the meetings that counted, newest last
        self._clock_budget = clock_budget(manifest)
        self._joined = (0, 0)  # clock and own steps when the weights were last taken over from other peers
        self._is_founder = True
        self._seed = peer_seed
        self._settings = inner_settings(manifest)
        self.inner = InnerLoop(manifest, model, corpus, computing, emit, devices)
        self.parameters = self.inner.parameters
        codecs = fragment_codecs(manifest, {name: tuple(p.shape) for name, p in self.parameters.items()})
        self.rule = NoLoCo(manifest.outer.alpha, manifest.outer.beta, manifest.outer.gamma)  # until the last averaging
        self.fragments = tuple(FragmentState(codec, self.parameters, self.rule.alpha > 0.0) for codec in codecs)
        self.probe_gate = ProbeGate()
        self.countdown = Countdown(len(codecs), manifest.outer.nominal_steps, peer_seed)

    @property
    def phase(self) -> RunPhase:
        """TRAIN until the global step reaches the run's end."""
        return RunPhase.TRAIN if self.global_step < self.manifest.run.total_steps else RunPhase.FINISH

    @property
    def plan(self) -> ModelPlan:
        """The sizes on the wire that follow from model and codec."""
        return model_plan([fragment.codec for fragment in self.fragments], self.manifest.outer.alpha)

    # ------------------------------------------------------------------ inner steps

    def inner_step(self, beside: AbstractContextManager[None] = ALONE) -> InnerStep:
        """Train on this peer's next batch. The gradient, which only reads weights, is computed inside `beside`.

        Raises FloatingPointError, with no weight changed, when the loss or a gradient is not finite; and as InnerLoop.gradient.
        """
        rate = learning_rate(self.global_step, self.steps_since_join(), self._settings)
        try:
            with beside:
                loss, norm, num_tokens = self.inner.gradient(self.own_steps, step_seed(self._seed, self.own_steps))
                is_finite = bool(torch.isfinite(norm + loss))  # waits for a GPU
            if not is_finite:
                raise FloatingPointError(f"inner step {self.own_steps}: loss {float(loss)}, gradient norm {float(norm)}")
            self.inner.devices.step(rate)
        finally:
            self.move_fast_weights()  # by meetings that were decided beside the gradient
        self.own_steps += 1
        self._clock_budget.refill()
        self.global_step = min(self.global_step + 1, self.manifest.run.total_steps)  # a meeting may have set it to the end meanwhile
        self.tokens += num_tokens
        self.count(num_tokens)
        return InnerStep(float(loss), rate, num_tokens)

    def skip_batch(self) -> None:
        """Pass over the next batch: its loss is not finite."""
        self.own_steps += 1

    def count(self, num_tokens: int) -> None:
        """Credit an inner step to every fragment."""
        for fragment in self.fragments:
            fragment.count(num_tokens)

    def steps_since_join(self) -> int:
        """Return the steps that the learning rate has had to warm up: a founder's all, else own ones since the weights were taken over."""
        return self.global_step if self._is_founder else self.own_steps - self._joined[1]

    # ------------------------------------------------------------------ outer steps

    def move_fast_weights(self) -> None:
        """Move the model's fast weights by the outer steps that were taken since the last call: at a step boundary."""
        for fragment in self.fragments:
            fragment.move_fast_weights()

    def take_solo_step(self, fragment: int, phase: RunPhase) -> None:
        """Take the outer step of a fragment without a partner; the model follows at the next `move_fast_weights`."""
        self.fragments[fragment].take_solo_step(FINISH if phase is RunPhase.FINISH else self.rule)
        self.count_outer_step(fragment, 0)

    def count_outer_step(self, fragment: int, partner_global_step: int, *, is_met: bool = True) -> None:
        """Count a fragment down anew, and follow a partner's clock that is far ahead; 0: there was no partner to follow.

        A call that brought nothing, not `is_met`, puts off no meeting with another partner.
        """
        if is_met or fragment in self.countdown.due():
            self.countdown.reset(fragment, self.fragments[fragment].since.steps)  # the steps made during the meeting count
        self.set_global_step(self._clock_budget.follow(self.global_step, partner_global_step))

    def journal(self, meeting_id: str) -> None:
        """Remember that a meeting counted, so that it never counts twice."""
        keep_newest(self.applied, meeting_id, None, JOURNALED)

    # ------------------------------------------------------------------ the state of other peers

    def set_global_step(self, global_step: int) -> None:
        """Set the clock to other peers' global step; the difference is credited to every fragment as steps that were not trained here."""
        for fragment in self.fragments:
            fragment.count_missed_steps(global_step - self.global_step)
        self.global_step = global_step

    def take_over(self, parts: Sequence[FragmentWeights], global_step: int) -> None:
        """Take over slow weights and momentum; the fast weights are the caller's to set. The optimizer and the warm-up begin anew."""
        for part in parts:
            part.fragment.replace(part.slow, part.momentum)
        self.inner.devices.forget()
        self.global_step = global_step
        self._is_founder = False
        self._joined = (global_step, self.own_steps)
        self._clock_budget.steps = 0

    # ------------------------------------------------------------------ checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the replica by name: the live ones, but copies of the optimizer state of other ranks."""
        tensors = {f"fast/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for index, fragment in enumerate(self.fragments):
            tensors[f"slow/{index}"] = fragment.slow
            if fragment.has_momentum:
                tensors[f"momentum/{index}"] = fragment.momentum
        for name, value in self.inner.devices.state().items():
            tensors[f"{INNER}{name}"] = value
        return tensors

    def changes(self, name: str) -> bool:
        """Return whether the next inner step writes to this one of `tensors`."""
        kept = name.removeprefix(INNER)
        return not name.startswith(REPLACED) and (kept == name or kept.split("/", 1)[1] in self.inner.devices.moved)

    def state(self) -> dict[str, Any]:
        """Return the rest of a checkpoint, JSON-able. Open meetings are not part of it."""
        return {
            "clock_steps": self.global_step,
            "own_steps": self.own_steps,
            "tokens": self.tokens,
            "may_follow_steps": self._clock_budget.steps,
            "joined": list(self._joined),
            "is_founder": self._is_founder,
            "countdown": self.countdown.state(),
            "outer": {
                "since": [asdict(fragment.since) for fragment in self.fragments],
                "applied": list(self.applied),
                "gate": [fragment.gate.state() for fragment in self.fragments],
                "gains": self.probe_gate.state(),
            },
            "corpus": self.corpus.cursor(),
        }

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore what `tensors` and `state` returned. Raises KeyError or ValueError for a checkpoint of another model."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"fast/{name}"])
        for index, fragment in enumerate(self.fragments):
            fragment.slow.copy_(tensors[f"slow/{index}"])
            if fragment.has_momentum:
                fragment.momentum.copy_(tensors[f"momentum/{index}"])
        self.inner.devices.restore({name.removeprefix(INNER): value for name, value in tensors.items() if name.startswith(INNER)})
        self.global_step, self.own_steps, self.tokens = state["clock_steps"], state["own_steps"], state["tokens"]
        self._clock_budget.steps = state.get("may_follow_steps", 0)  # a checkpoint of before this bound has none
        self._joined = (state["joined"][0], state["joined"][1])
        self._is_founder = state["is_founder"]
        self.countdown.restore(state["countdown"])
        outer = state["outer"]
        for fragment, since, gate in zip(self.fragments, outer["since"], outer["gate"], strict=True):
            fragment.since = Since(**since)
            fragment.gate.restore(gate)
        self.probe_gate.restore(outer.get("gains", []))  # a checkpoint of before the probe has none
        self.applied = dict.fromkeys(outer["applied"])
        self.corpus.restore(state["corpus"])
        self.inner.forget_batch()


def step_seed(peer_seed: int, own_steps: int) -> int:
    """Derive the random seed of one inner step."""
    return int.from_bytes(hashlib.sha256(f"{peer_seed}/{own_steps}".encode()).digest()[:8], "little") >> 1
