"""A simulated swarm: replicas built from a scenario, and an estimate of their memory before they are built.

Each replica's fast weights are one flat vector, fragment after fragment, and its model is a view of it. An inner step computes what a real
peer's does (peer/trainer/replica.py) in two calls, because data-parallel training averages the gradients of many peers between them. A
batch without a finite loss, which a real peer skips, ends the simulation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import psutil
import torch
from torch import Tensor

from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.inner import build_optimizer, learning_rate, set_learning_rate
from gossamer.peer.model.accelerator import has_own_memory, memory_bytes
from gossamer.peer.model.computing import compute_dtype, next_token_loss
from gossamer.peer.model.evaluation import mask_as_run
from gossamer.peer.model.model import build_model, check_fit, model_config, num_parameters, placed
from gossamer.peer.model.plan import ClockBudget, fragment_codecs
from gossamer.peer.model.stages import manifest_cuts, stage_shapes
from gossamer.peer.simulator.scenario import Scenario
from gossamer.peer.simulator.texts import Batches, Texts
from gossamer.peer.text.tokenizer import Tokenizer
from gossamer.protocol.errors import BadSettings, OperatorError
from gossamer.protocol.run.manifest import StagedManifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COOLER: Final = "lower learning_rate, or the outer step (beta, alpha)"
VALUE_BYTES: Final = 4
INNER_VECTORS: Final = 3  # fast weights and the inner optimizer's two moments
SHARED_VECTORS: Final = 4  # one gradient, and the temporaries of a meeting or a measurement
ACTIVATION_VALUES: Final = 24  # kept for the backward pass, per token, layer and hidden unit; about


class Diverged(OperatorError):
    """The loss or a gradient is no longer finite."""


@contextmanager
def coding(what: str) -> Iterator[None]:
    """Turn a codec's ValueError for values that cannot be weights into Diverged."""
    try:
        yield
    except ValueError as error:
        raise Diverged(f"{what} diverged: {error}", hint=COOLER) from error


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the fragments lie in a flat vector of all weights, and how each is coded."""

    codecs: tuple[FragmentCodec, ...]
    slices: tuple[slice, ...]

    @property
    def numel(self) -> int:
        """Return the number of values of the flat vector."""
        return self.slices[-1].stop  # type: ignore[no-any-return] # slice has no element type

    @property
    def bits_per_value(self) -> float:
        """Return the bits per value that one exchange of all fragments sends one way."""
        return 8.0 * sum(codec.sketch_bytes + codec.payload_bytes for codec in self.codecs) / self.numel

    def place(self, parameters: Mapping[str, Tensor], flat: Tensor) -> None:
        """Make the parameters views of the flat vector, keeping their values."""
        for codec, part in zip(self.codecs, self.slices, strict=True):
            pieces = codec.fragment.pieces
            for piece, values in zip(pieces, torch.split(flat[part], [piece.numel for piece in pieces]), strict=True):
                if piece.rows is not None:
                    raise BadSettings(
                        f"{piece.name} would be cut between two fragments, which only real peers can do",
                        hint="raise max_fragment_mb, or simulate a smaller model",
                    )
                parameter = parameters[piece.name]
                parameter.data = values.view(parameter.shape).copy_(parameter.data)


class SimulatedReplica:
    """One peer's model in training. `weights` (f32, flat) are its fast weights and the model's own storage.

    `rate` is the rate at which its learning rate schedule runs.
    """

    def __init__(self, number: int, model: PreTrainedModel, layout: Layout, texts: Texts, scenario: Scenario, rate: Fraction) -> None:
        self.number = number
        self.model = model
        self.own_steps = 0
        self.global_step = 0
        self.losses: list[float] = []  # of the inner steps since the recorder last cleared them
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.weights = torch.empty(layout.numel, device=model.device)
        self.batches = texts.batches[number]
        self.is_routed = False  # its gradients come from the micro-batches that pass through its stages (stages.py)
        self.clipped: list[list[Tensor]] = [list(self.parameters.values())]  # what is clipped together
        self.dtype = compute_dtype(scenario.manifest.inner.precision, model.device)
        self._texts = texts
        self._settings = scenario.inner_settings_at(rate)
        self._manifest, outer = scenario.manifest, scenario.manifest.outer
        self.clock_budget = ClockBudget(outer.nominal_steps, outer.max_clock_gap_steps, self._settings.total_steps)
        layout.place(self.parameters, self.weights)
        self._optimizer = build_optimizer(scenario.manifest.inner.optimizer, self.parameters.items(), self._settings)

    def inner_step(self) -> None:
        """Train on this peer's next batch; in a staged run, on what has passed through it. Raises Diverged."""
        if not self.is_routed:
            self.add_gradient(self.batches, self.own_steps)
        self.apply_gradient()

    def other_text(self) -> Tensor:
        """Return sequences of this peer's text on which it does not train now, int64[N, L+1]."""
        return self._texts.other(self.number).to(self.weights.device)

    def taken_losses(self) -> list[float]:
        """Return the losses since the last call."""
        losses, self.losses = self.losses, []
        return losses

    def add_gradient(self, batches: Batches, step: int) -> None:
        """Add the gradient of a batch to the parameters' gradients."""
        loss = next_token_loss(self.model, batches.batch(step).to(self.weights.device), self.dtype)
        loss.backward()  # type: ignore[no-untyped-call]
        self.losses.append(float(loss.detach()))

    def gradients(self) -> dict[str, Tensor]:
        """Return the parameters' gradients by name, not copied. Call it after `add_gradient`."""
        return {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}

    def apply_gradient(self) -> None:
        """Clip the gradient, take the inner optimizer's step, and free the gradient. Raises Diverged."""
        set_learning_rate(self._optimizer, learning_rate(self.global_step, self.global_step, self._settings))
        clip_norm = self._manifest.inner.clip_norm
        norm = math.hypot(*(float(torch.nn.utils.clip_grad_norm_(tensors, clip_norm)) for tensors in self.clipped))
        if not norm < float("inf"):
            raise Diverged(
                f"peer {self.number} diverged at its inner step {self.own_steps}: loss {self.losses[-1]:.3g}, gradient norm {norm:.3g}",
                hint=COOLER,
            )
        self._optimizer.step()
        self._optimizer.zero_grad()  # N replicas need one gradient at a time
        self.own_steps += 1
        self.global_step += 1
        self.clock_budget.refill()

    def catch_up(self, partner_global_step: int) -> None:
        """Follow a partner's global step as a real peer does."""
        self.global_step = self.clock_budget.follow(self.global_step, partner_global_step)


@dataclass(slots=True)
class Traffic:
    """Counts of exchanges so far, over all peers."""

    completed: int = 0  # meetings of pairs, or exchanges of a group
    solo: int = 0
    dropped: int = 0  # because a peer left
    refused: int = 0  # by the merge gate of either side
    hostile: int = 0  # messages of attackers to honest peers
    hostile_merged: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Population:
    """A simulated swarm, with one replica per distinct set of weights: a method that keeps all peers equal has one."""

    scenario: Scenario
    layout: Layout
    replicas: tuple[SimulatedReplica, ...]
    texts: Texts
    traffic: Traffic = field(default_factory=Traffic)


def populate(scenario: Scenario, tokenizer: Tokenizer, texts: Texts, device: torch.device, schedules: Sequence[Fraction]) -> Population:
    """Build one replica per entry of `schedules`, its rate of the learning rate schedule. Raises BadManifest for an impossible model."""
    manifest = scenario.manifest
    model = build_model(manifest.model, scenario.seed)
    check_fit(model.config, tokenizer.vocab_size, manifest.inner.sequence_length)
    mask_as_run(model, manifest)
    cuts = manifest_cuts(manifest) if isinstance(manifest, StagedManifest) else ()
    whole = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    parts = [stage_shapes(manifest.model, cut) for cut in cuts] or [whole]
    codecs = tuple(codec for part in parts for codec in fragment_codecs(manifest, part))  # each stage has fragments of its own
    ends = accumulate((codec.fragment.numel for codec in codecs), initial=0)
    layout = Layout(codecs, tuple(slice(start, stop) for start, stop in pairwise(ends)))
    first = placed(model, device)
    models = [first, *(copy.deepcopy(first) for _ in schedules[1:])]
    replicas = tuple(
        SimulatedReplica(number, one, layout, texts, scenario, rate)
        for number, (one, rate) in enumerate(zip(models, schedules, strict=True))
    )
    return Population(scenario, layout, replicas, texts)


@dataclass(frozen=True, slots=True)
class Size:
    """The memory of a method beside that of inner training, in vectors of all weights."""

    num_peers: int
    own_vectors: int  # per replica
    common_vectors: int
    peer_vectors: int = 0  # per peer, even where one replica stands for all
    one_replica: bool = False

    @property
    def num_replicas(self) -> int:
        """Return the number of distinct sets of weights."""
        return 1 if self.one_replica else self.num_peers

    @property
    def num_vectors(self) -> int:
        """Return the number of vectors, those of inner training included."""
        own = self.num_replicas * (INNER_VECTORS + self.own_vectors)
        return own + self.num_peers * self.peer_vectors + SHARED_VECTORS + self.common_vectors


def need_memory(scenario: Scenario, device: torch.device, size: Size) -> None:
    """Raise BadSettings, with an estimate, when the replicas do not fit into the device's free memory."""
    num_values = num_parameters(scenario.manifest.model)
    activations, free = _activation_values(scenario), free_bytes(device)

    def needed(num_peers: int) -> int:
        return VALUE_BYTES * (num_values * replace(size, num_peers=num_peers).num_vectors + activations)

    if needed(size.num_peers) > free:
        fits = 1 + (free - needed(1)) // (needed(2) - needed(1)) if needed(1) <= free else 0
        residuals = f", with error feedback for {size.num_peers} peers," if size.peer_vectors else ""
        raise BadSettings(
            f"{size.num_replicas} replicas of {num_values} parameters{residuals} need about "
            f"{needed(size.num_peers) / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
            hint=f"--peers {fits} would fit" if fits else "choose a smaller model or a machine with more memory",
        )


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device."""
    return memory_bytes(device)[0] if has_own_memory(device.type) else int(psutil.virtual_memory().available)


def _activation_values(scenario: Scenario) -> int:
    """Estimate the values that one inner step keeps: hidden states per layer, and logits with their gradient."""
    config = model_config(scenario.manifest.model).get_text_config()
    layers, hidden = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    return scenario.step_tokens * (ACTIVATION_VALUES * int(layers) * int(hidden) + 3 * int(config.vocab_size))
