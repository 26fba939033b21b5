"""The fast or slow weights in a checkpoint by parameter name, for evaluation and export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gossamer.optim.fragments import scatter
from gossamer.peer.machine.held_manifest import need_manifest
from gossamer.peer.machine.home import Home
from gossamer.peer.model.checkpoint import CheckpointContents, latest_shapes, load_latest
from gossamer.peer.model.model import parameter_shapes, state_tensors
from gossamer.peer.model.plan import fragment_codecs
from gossamer.peer.model.trainable import shapes_of
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.layout import Shapes, by_name
from gossamer.protocol.run.manifest import AnyManifest, ProgramManifest

FAST: Final = "fast/"  # names in the checkpoint: fast/<parameter>, slow/<fragment>

Show = Callable[[str, int, int, float | None], None]  # called with the name of the work, its done and total amounts, and the loss so far


def show_nothing(work: str, done: int, total: int, loss: float | None) -> None:
    """Show no progress."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The manifest and the newest checkpoint of a peer's home."""

    manifest: AnyManifest
    checkpoint: CheckpointContents

    @property
    def shapes(self) -> Shapes:
        """The shapes of the weights, in the order in which they are cut into fragments. Raises BadManifest."""
        if isinstance(self.manifest, ProgramManifest):
            return by_name(shapes_of(fast_weights(self.checkpoint)))
        shapes, held = parameter_shapes(self.manifest.model), fast_weights(self.checkpoint)
        return {name: shape for name, shape in shapes.items() if name in held}  # of a staged run: of one stage


@contextmanager
def writing() -> Iterator[None]:
    """Turn what libraries raise when the disk refuses, of types of their own, into OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(str(error)) from error


def load_trained(home: Home, show: Show = show_nothing) -> Trained:
    """Read a home's manifest and newest checkpoint, and show the progress.

    Raises BadManifest, or BadSettings if there is no checkpoint or all are damaged.
    """
    manifest = need_manifest(home).manifest()

    def reading(done_bytes: int, total_bytes: int) -> None:
        show("reading the checkpoint, MB", done_bytes // 1_000_000, max(1, total_bytes // 1_000_000), None)

    loaded = load_latest(home.checkpoints, manifest.run_id, reading)
    if loaded is None:
        raise BadSettings(f"{home.path} holds no checkpoint yet", hint="train first, or name the peer's folder with --home DIR")
    return Trained(manifest, loaded.contents)


def saved_shapes(home: Home) -> tuple[Shapes, int] | None:
    """Return the shapes of the weights in a home's newest checkpoint, and the checkpoint's bytes, without reading it; None without one."""
    found = latest_shapes(home.checkpoints)
    if found is None:
        return None
    shapes, num_bytes = found
    return {name.removeprefix(FAST): shape for name, shape in shapes.items() if name.startswith(FAST)}, num_bytes


def fast_weights(checkpoint: CheckpointContents) -> dict[str, Tensor]:
    """Return the weights that the inner optimizer moves, by parameter; the checkpoint's own tensors."""
    return {name.removeprefix(FAST): tensor for name, tensor in checkpoint.tensors.items() if name.startswith(FAST)}


def slow_weights(trained: Trained) -> dict[str, Tensor]:
    """Return the weights that the outer step moves, by parameter, as new tensors.

    Until the first outer step they are the initial weights; at a peer that trains alone they stay so.
    """
    shapes = trained.shapes
    weights = {name: torch.empty(shape) for name, shape in shapes.items()}
    for codec in fragment_codecs(trained.manifest, shapes):
        scatter(codec.fragment, trained.checkpoint.tensors[f"slow/{codec.fragment.id}"], weights)
    return weights


def mean_weights(several: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the plain average of several models' weights, summed in float64; new tensors of the first one's types."""
    if not several:
        raise ValueError("The average of no models is undefined.")
    return {
        name: sum((weights[name].double() for weights in several), torch.zeros((), dtype=torch.float64)).div(len(several)).to(first.dtype)
        for name, first in several[0].items()
    }


def set_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into the whole state of a model. Raises KeyError for a parameter or buffer without a weight."""
    with torch.no_grad():
        for name, tensor in state_tensors(model).items():
            tensor.copy_(weights[name])
