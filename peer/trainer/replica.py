"""One replica of the model in training: fast and slow weights, step counters, and everything that a checkpoint holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, Final

from torch import Tensor

from gossamer.optim.fragments import Countdown
from gossamer.optim.noloco import AVERAGE, FINISH, NoLoCo
from gossamer.peer.model.plan import clock_budget, fragment_codecs, model_plan
from gossamer.peer.model.trainable import shapes_of
from gossamer.peer.model.weights import FAST
from gossamer.peer.trainer.fragment_state import FragmentState, FragmentWeights, Since
from gossamer.peer.trainer.losses import Losses
from gossamer.peer.trainer.probe import ProbeGate
from gossamer.peer.trainer.program import Kept, Program
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.terms import ModelPlan
from gossamer.protocol.newest import keep_newest
from gossamer.protocol.run.manifest import AnyManifest

REPLACED: Final = ("slow/", "momentum/")  # in the names of kept tensors: an outer step replaces these and never writes to them
JOURNALED: Final = 256  # applied meetings that are remembered; the node never asks for an older one again
ALONE: Final = nullcontext()


class Replica:
    """A program's weights among other peers'. Writes to them. Not thread-safe: exchange.py says which thread may call it, and when."""

    def __init__(self, manifest: AnyManifest, program: Program, peer_seed: int) -> None:
        self.manifest = manifest
        self.program = program
        self.global_step = self.own_steps = self.tokens = 0  # the global step as far as this peer knows it
        self.brought: Losses | None = None  # of what this peer brought to the last averaging
        self.applied: dict[str, None] = {}  # the ids of the meetings that counted, newest last
        self._clock_budget = clock_budget(manifest)
        self._joined = (0, 0)  # clock and own steps when the weights were last taken over from other peers
        self._is_founder = True
        self.weights = program.weights
        self.parameters = self.weights.tensors
        codecs = fragment_codecs(manifest, shapes_of(self.parameters))
        self._rule = NoLoCo(manifest.outer.alpha, manifest.outer.beta, manifest.outer.gamma)
        self.fragments = tuple(FragmentState(codec, self.weights, self._rule.alpha > 0.0) for codec in codecs)
        self.probe_gate = ProbeGate()
        self.countdown = Countdown(len(codecs), manifest.outer.nominal_steps, peer_seed)

    @property
    def phase(self) -> RunPhase:
        """TRAIN until the global step reaches the run's end."""
        return RunPhase.TRAIN if self.global_step < self.manifest.run.total_steps else RunPhase.FINISH

    @property
    def last_step(self) -> int:
        """The global step to which own inner steps lead at most."""
        return self.manifest.run.total_steps

    @property
    def num_gathered(self) -> int:
        """The tokens whose gradient the next inner step takes: of a stage, whose step waits for micro-batches."""
        return 0

    @property
    def plan(self) -> ModelPlan:
        """The sizes on the wire that follow from model and codec."""
        return model_plan([fragment.codec for fragment in self.fragments], self.manifest.outer.alpha)

    # ------------------------------------------------------------------ inner steps

    def count_step(self, num_tokens: int) -> None:
        """Count an inner step that the program has made."""
        self.own_steps += 1
        self._clock_budget.refill()
        if self.global_step < self.last_step:  # a meeting may have set it to the end meanwhile
            self.global_step += 1
        self.tokens += num_tokens
        self.count(num_tokens)

    def skip_step(self) -> None:
        """Pass over a step: its batch gave no finite loss."""
        self.own_steps += 1

    def count(self, num_tokens: int) -> None:
        """Credit an inner step to every fragment."""
        for fragment in self.fragments:
            fragment.count(num_tokens)

    def steps_since_join(self) -> int:
        """Return the steps that the learning rate has had to warm up: a founder's all, else own ones since the weights were taken over."""
        return self.global_step if self._is_founder else self.own_steps - self._joined[1]

    # ------------------------------------------------------------------ outer steps

    @property
    def owes_move(self) -> bool:
        """Whether `move_fast_weights` has anything to do."""
        return any(fragment.owes_move for fragment in self.fragments)

    def move_fast_weights(self) -> None:
        """Move the model's fast weights by the outer steps that were taken since the last call: at a step boundary."""
        for fragment in self.fragments:
            fragment.move_fast_weights()

    def rule_of(self, fragment: int, phase: RunPhase) -> NoLoCo:
        """Return the rule of a fragment's outer step in this phase."""
        if self.weighs_tokens(fragment, phase):
            return self._rule
        return FINISH if phase is RunPhase.FINISH else AVERAGE

    def weighs_tokens(self, fragment: int, phase: RunPhase) -> bool:
        """Whether a fragment's outer step weighs both sides by their tokens: not at the end of a run, and never for statistics."""
        return phase is not RunPhase.FINISH and not self.fragments[fragment].codec.fragment.holds_statistics

    def take_solo_step(self, fragment: int, phase: RunPhase) -> None:
        """Take the outer step of a fragment without a partner; the model follows at the next `move_fast_weights`."""
        self.fragments[fragment].take_solo_step(self.rule_of(fragment, phase))
        self.count_outer_step(fragment, 0)

    def count_outer_step(self, fragment: int, partner_global_step: int, *, is_met: bool = True) -> None:
        """Count a fragment down anew, and follow a partner's clock that is far ahead; 0: there was no partner to follow.

        A call that brought nothing, not `is_met`, puts off no meeting with another partner.
        """
        if is_met or fragment in self.countdown.due():
            self.countdown.reset(fragment, self.fragments[fragment].since.steps)  # the steps made during the meeting count
        self.follow_clock(partner_global_step)

    def must_probe(self, partner_global_step: int) -> bool:
        """Return whether the message of a partner at this global step is measured, however good the partner's record is."""
        return self._clock_budget.must_probe(self.global_step, partner_global_step)

    def follow_clock(self, global_step: int) -> None:
        """Follow another peer's global step, as far as own steps allow, and no further than own inner steps lead."""
        self.set_global_step(self._clock_budget.follow(self.global_step, min(global_step, self.last_step)))

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
        self.program.forget_optimizer()
        self.global_step = global_step
        self.note_joined()

    def note_joined(self) -> None:
        """Note that this peer joins the others now: the warm-up begins anew."""
        self._is_founder = False
        self._joined = (self.global_step, self.own_steps)
        self._clock_budget.steps = 0

    # ------------------------------------------------------------------ checkpoints

    def kept(self) -> Kept:
        """Return a checkpoint's contents, without open meetings: live tensors, but copies of sharded ones and of some of the program's."""
        program = self.program.kept()
        tensors = {f"{FAST}{name}": tensor for name, tensor in self.weights.values().items()}
        for index, fragment in enumerate(self.fragments):
            tensors[f"slow/{index}"] = fragment.slow
            if fragment.has_momentum:
                tensors[f"momentum/{index}"] = fragment.momentum
        return Kept(tensors | program.tensors, self._counters() | program.state)

    def changes(self, name: str) -> bool:
        """Return whether the next inner step writes to this one of the kept tensors."""
        if name.startswith(FAST):
            return not self.weights.is_sharded
        return not name.startswith(REPLACED) and self.program.changes(name)

    def _counters(self) -> dict[str, Any]:
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
        }

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore what `kept` returned, while no meeting is open; takes ownership. Raises KeyError or ValueError for another model's."""
        self.weights.restore({name: tensors[f"{FAST}{name}"] for name in self.parameters})
        for index, fragment in enumerate(self.fragments):
            slow = tensors[f"slow/{index}"]
            momentum = tensors[f"momentum/{index}"] if fragment.has_momentum else fragment.momentum
            if slow.shape != fragment.slow.shape or momentum.shape != fragment.momentum.shape:
                raise ValueError(f"fragment {index} has {slow.numel()} values, this model's {fragment.slow.numel()}")
            fragment.replace(slow, momentum)
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
        self.program.restore(tensors, state)


def peer_seed(run_seed: int, peer_id: PeerId) -> int:
    """Derive this peer's random seed from the run's."""
    return int.from_bytes(hashlib.sha256(run_seed.to_bytes(8, "little") + peer_id.raw).digest()[:6], "little")
