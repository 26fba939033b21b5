"""What a peer trains, as far as meetings, checkpoints and other peers' weights concern it: no text, no loop, no optimizer's kind.

Two programs exist: the trainer's own on text (text_training.py), and any PyTorch program that uses the library (gossamer/swarm.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gossamer.peer.trainer.losses import Losses
from gossamer.peer.trainer.probe import Probe
from gossamer.peer.trainer.weights import Weights


class Kept(NamedTuple):
    """What a checkpoint keeps: tensors by name, live ones or copies, and all else, JSON-able."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Program(Protocol):
    """The weights that travel between peers, how they are measured, and what else a checkpoint keeps. Belongs to the trainer's thread."""

    @property
    def weights(self) -> Weights:
        """The tensors that travel: the program's own; the caller writes to them between two steps."""

    @property
    def device(self) -> torch.device:
        """The device on which meetings are computed."""

    def losses(self) -> Losses:
        """Measure the weights on held-out data, the same at each call: by this other peers' weights are compared with our own.

        Raises MeasureFailed.
        """

    def evaluation(self) -> tuple[float, int] | None:
        """Measure the weights for a report: the held-out loss, and the number of batches behind it; None: it cannot.

        Raises MeasureFailed.
        """

    def outputs(self) -> Tensor | None:
        """Return log-probabilities, f32[N, classes], by which to measure how far a merge moves the outputs; None: it has none."""

    def new_probe(self, rng: random.Random) -> Probe | None:
        """Return what measures merges; None: they are judged by their length alone."""

    def kept(self) -> Kept:
        """Return what a checkpoint keeps beside the weights."""

    def changes(self, name: str) -> bool:
        """Return whether the next step writes to this one of the kept tensors."""

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore what `kept` returned, after the weights. Raises KeyError or ValueError for another program's."""

    def forget_optimizer(self) -> None:
        """Clear the optimizer's state: the weights are another peer's now."""

    def cpu_s(self) -> float:
        """Return the processor time of the processes beside this one."""

    def close(self) -> None:
        """Close what the program has open."""
