"""The replicas of a simulation: each one's fast weights lie in one flat vector, fragment after fragment, of which its model is a view.

So a fragment is a slice, to be read and written without gathering, and the mean over replicas is a mean of vectors. An inner step does what
a real peer's does (peer/trainer/replica.py), but is not its code: gradient and step are two calls here, for data-parallel training averages
many peers' gradients between them; a gradient goes as soon as it was used, for N replicas need one at a time; and a batch that gives no
finite loss, which a real peer passes over, ends the simulation.
Not here: slow weights and outer steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optim.fragment_codec import FragmentCodec
from optim.inner import InnerSettings, build_optimizer, learning_rate, set_learning_rate
from peer.model.model import next_token_loss
from peer.model.plan import follow_clock, fragment_codecs
from peer.simulator.texts import Batches
from protocol.errors import OperatorError
from protocol.run.manifest import Manifest

COOLER: Final = "lower learning_rate, or the outer step (beta, alpha)"


class Diverged(OperatorError):
    """The loss or a gradient is not finite any more."""


@contextmanager
def coding(what: str) -> Iterator[None]:
    """Turn a codec's refusal of values that are no weights any more into Diverged."""
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
        """Return how many values the flat vector has."""
        return self.slices[-1].stop  # type: ignore[no-any-return] # slice has no element type

    @property
    def bits_per_value(self) -> float:
        """Return what one exchange of everything sends one way, per value."""
        return 8.0 * self.exchange_bytes / self.numel

    @property
    def exchange_bytes(self) -> int:
        """Return what one exchange of everything sends one way."""
        return sum(codec.sketch_bytes + codec.payload_bytes for codec in self.codecs)

    def place(self, parameters: Mapping[str, Tensor], flat: Tensor) -> None:
        """Make the parameters views of the flat vector, with their values kept."""
        for codec, part in zip(self.codecs, self.slices, strict=True):
            pieces = codec.fragment.pieces
            for piece, values in zip(pieces, torch.split(flat[part], [piece.numel for piece in pieces]), strict=True):
                parameter = parameters[piece.name]
                parameter.data = values.view(parameter.shape).copy_(parameter.data)


def lay_out(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Cut a model of these parameter shapes into fragments as its manifest says."""
    codecs = fragment_codecs(manifest, shapes)
    ends = accumulate((codec.fragment.numel for codec in codecs), initial=0)
    return Layout(codecs, tuple(slice(start, stop) for start, stop in pairwise(ends)))


@dataclass(frozen=True, slots=True)
class Inner:
    """How a replica takes its inner steps."""

    settings: InnerSettings
    optimizer: str  # a name of optim.inner
    clip_norm: float
    slack_steps: int  # see follow_clock


class SimulatedReplica:
    """One peer's model in training. `weights` (f32, flat) are its fast weights and the model's own storage."""

    def __init__(self, number: int, model: PreTrainedModel, layout: Layout, batches: Batches, inner: Inner) -> None:
        self.number = number
        self.model = model
        self.own_steps = 0
        self.clock_steps = 0
        self.losses: list[float] = []  # of the inner steps since somebody last took them
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._batches = batches
        self._inner = inner
        self.weights = torch.empty(layout.numel, device=model.device)
        layout.place(self.parameters, self.weights)
        self._optimizer = build_optimizer(inner.optimizer, self.parameters.items(), inner.settings)

    def inner_step(self) -> None:
        """Train on this peer's next batch. Raises Diverged."""
        self.add_gradient(self._batches, self.own_steps)
        self.apply_gradient()

    def add_gradient(self, batches: Batches, step: int) -> None:
        """Add the gradient of a batch to the parameters' gradients."""
        loss = next_token_loss(self.model, batches.batch(step).to(self.weights.device))
        loss.backward()  # type: ignore[no-untyped-call]
        self.losses.append(float(loss.detach()))

    def gradients(self) -> dict[str, Tensor]:
        """Return the parameters' gradients by name: the live ones. Call it after `add_gradient`."""
        return {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}

    def apply_gradient(self) -> None:
        """Clip the gradient, take the inner optimizer's step, and let go of the gradient. Raises Diverged."""
        set_learning_rate(self._optimizer, learning_rate(self.clock_steps, self.clock_steps, self._inner.settings))
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._inner.clip_norm))
        if not norm < float("inf"):
            raise Diverged(
                f"peer {self.number} diverged at its inner step {self.own_steps}: loss {self.losses[-1]:.3g}, gradient norm {norm:.3g}",
                hint=COOLER,
            )
        self._optimizer.step()
        self._optimizer.zero_grad()  # N replicas need one gradient at a time
        self.own_steps += 1
        self.clock_steps += 1

    def hear_clock(self, partner_clock_steps: int) -> None:
        """Follow a partner's schedule clock, never faster than a bounded factor over one's own steps; as a real peer does."""
        inner = self._inner
        self.clock_steps = follow_clock(
            self.clock_steps, partner_clock_steps, inner.slack_steps, self.own_steps, inner.settings.total_steps
        )


def replicate(model: PreTrainedModel, count: int) -> list[PreTrainedModel]:
    """Return `count` models with equal weights; the given one is the first."""
    return [model, *(copy.deepcopy(model) for _ in range(count - 1))]
