"""Everything that a simulated swarm is made of, put together from a scenario; and the size it will have, before it is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Final

import psutil
import torch

from peer.model.model import build_model, check_fit, model_config, parameter_shapes
from peer.simulator.replicas import Inner, Layout, SimulatedReplica, lay_out, replicate
from peer.simulator.scenario import Scenario
from peer.simulator.texts import Texts
from peer.simulator.timeline import Presence
from peer.text.tokenizer import Tokenizer
from protocol.errors import BadSettings

VALUE_BYTES: Final = 4
INNER_VECTORS: Final = 3  # fast weights and the inner optimizer's two moments
SHARED_VECTORS: Final = 4  # one gradient, and the temporaries of a meeting or a measurement
ACTIVATION_VALUES: Final = 24  # kept for the backward pass, per token, layer and hidden unit; about


@dataclass(slots=True)
class Traffic:
    """What was exchanged so far, over all peers."""

    completed: int = 0  # meetings of pairs, or exchanges of a group
    solo: int = 0
    dropped: int = 0  # because a peer went away
    refused: int = 0  # by the merge gate of either side
    sent_bytes: int = 0

    def sent(self, num_bytes: int) -> None:
        """Count bytes that peers sent."""
        self.sent_bytes += num_bytes


@dataclass(frozen=True, slots=True)
class Size:
    """What a method keeps, beside what inner training needs, in vectors of all weights."""

    num_peers: int
    own_vectors: int  # per replica
    common_vectors: int
    peer_vectors: int = 0  # per peer, also where one replica stands for all
    one_replica: bool = False

    @property
    def num_replicas(self) -> int:
        """Return how many different weights are kept."""
        return 1 if self.one_replica else self.num_peers

    @property
    def num_vectors(self) -> int:
        """Return how many vectors that is, with those of inner training."""
        own = self.num_replicas * (INNER_VECTORS + self.own_vectors)
        return own + self.num_peers * self.peer_vectors + SHARED_VECTORS + self.common_vectors


@dataclass(frozen=True, slots=True)
class Population:
    """A simulated swarm. `replicas` are as many as there are different weights: one for a method that keeps all peers equal."""

    scenario: Scenario
    layout: Layout
    replicas: tuple[SimulatedReplica, ...]
    texts: Texts
    presence: Presence
    traffic: Traffic = field(default_factory=Traffic)


def populate(scenario: Scenario, tokenizer: Tokenizer, texts: Texts, device: torch.device, schedules: Sequence[Fraction]) -> Population:
    """Build a replica per entry of `schedules`, the rate at which its learning rate's schedule runs; all with the initial weights.

    Raises BadManifest for a model that cannot be.
    """
    manifest = scenario.manifest
    model = build_model(manifest.model, scenario.seed)
    check_fit(model.config, tokenizer.vocab_size, manifest.inner.sequence_length)
    layout = lay_out(manifest, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    models = replicate(model.to(device), len(schedules))
    replicas = tuple(
        SimulatedReplica(number, one, layout, texts.batches[number], _inner(scenario, rate))
        for number, (one, rate) in enumerate(zip(models, schedules, strict=True))
    )
    return Population(scenario, layout, replicas, texts, Presence(scenario.seed, scenario.drop_out, manifest.outer.inner_steps))


def _inner(scenario: Scenario, rate: Fraction) -> Inner:
    inner = scenario.manifest.inner
    return Inner(scenario.inner(rate), inner.optimizer, inner.clip_norm, scenario.manifest.outer.inner_steps)


def need_memory(scenario: Scenario, device: torch.device, size: Size) -> None:
    """Raise BadSettings, with an estimate, when the replicas will not fit into the device's free memory."""
    num_values = sum(torch.Size(shape).numel() for shape in parameter_shapes(scenario.manifest.model).values())
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
    """Return how much memory is free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def _activation_values(scenario: Scenario) -> int:
    """About how many values one inner step keeps: hidden states per layer, and logits with their gradient."""
    config = model_config(scenario.manifest.model).get_text_config()
    layers, hidden = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    return scenario.step_tokens * (ACTIVATION_VALUES * int(layers) * int(hidden) + 3 * int(config.vocab_size))
