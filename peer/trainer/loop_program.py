"""What the trainer's own programs share: weights in an inner loop, its optimizer, and a place in a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from gossamer.peer.text.corpus import Corpus
from gossamer.peer.trainer.device import OneDevice
from gossamer.peer.trainer.program import Kept, Program
from gossamer.peer.trainer.weights import Weights

if TYPE_CHECKING:
    from gossamer.peer.trainer.ranks import Ranks  # loaded only for several devices

OPTIMIZER: Final = "inner/"  # in the names of a checkpoint's tensors


class Loop(Protocol):
    """Computes the gradients of inner steps: of the peer's own batches (InnerLoop), or of what passes through one stage (StageLoop)."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What trains, by name."""

    @property
    def device(self) -> torch.device:
        """The model's device, the first of several."""

    @property
    def devices(self) -> OneDevice | Ranks:
        """The gradient, and the optimizer's step."""

    @property
    def waited_s(self) -> float:
        """How long `gradient` has waited for work so far."""

    def gradient(self, step: int, seed: int) -> tuple[Tensor, Tensor, int] | None:
        """Compute a step's clipped gradient; return mean loss, length before clipping and tokens that train; None: not whole yet."""

    def forget_batch(self) -> None:
        """Forget what is prepared of the next steps: weights and place in the text are others now."""


class LoopProgram(Program):
    """A program whose inner loop is ours; subclasses measure it. `corpus` is None where the peer needs no text.

    The loop's tensors are written to.
    """

    def __init__(self, inner: Loop, corpus: Corpus | None) -> None:
        self.inner = inner
        self.corpus = corpus
        self._weights = Weights(inner.parameters)

    @property
    def weights(self) -> Weights:
        """The loop's tensors."""
        return self._weights

    @property
    def device(self) -> torch.device:
        """The model's device, the first of several."""
        return self.inner.device

    def kept(self) -> Kept:
        """Return the optimizer's state, with copies of what other ranks hold, and the place in the text."""
        tensors = {f"{OPTIMIZER}{name}": value for name, value in self.inner.devices.state().items()}
        return Kept(tensors, {} if self.corpus is None else {"corpus": self.corpus.cursor()})

    def changes(self, name: str) -> bool:
        """Return whether it is a live tensor: the state of a parameter that this rank's optimizer moves."""
        return name.removeprefix(OPTIMIZER).split("/", 1)[1] in self.inner.devices.moved

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore the optimizer's state and the place in the text."""
        given = {name.removeprefix(OPTIMIZER): value for name, value in tensors.items() if name.startswith(OPTIMIZER)}
        self.inner.devices.restore(given)
        if self.corpus is not None:
            self.corpus.restore(state["corpus"])
        self.inner.forget_batch()

    def forget_optimizer(self) -> None:
        """Clear the optimizer's state."""
        self.inner.devices.forget()

    def cpu_s(self) -> float:
        """Return the processor time of the other ranks."""
        return self.inner.devices.cpu_s()

    def close(self) -> None:
        """Close the text, and end the other ranks."""
        if self.corpus is not None:
            self.corpus.close()
        self.inner.devices.close()
