"""The inner loop of one replica: a batch's gradient, in as many parts as the memory asks for, and the optimizer's step.

The gradient is the mean over the whole batch whatever the parts. Where memory runs out, the same batch is tried again in smaller parts,
then with the optimizer's state on the host, at last with activations recomputed instead of kept. The next batch is fetched while the device
still computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gossamer.peer.machine.events import ComputingSet, Event
from gossamer.peer.model.accelerator import has_own_memory
from gossamer.peer.model.computing import Computing, can_recompute
from gossamer.peer.model.model import state_tensors
from gossamer.peer.text.corpus import Corpus
from gossamer.peer.text.labels import num_targets
from gossamer.peer.trainer.device import OneDevice
from gossamer.protocol.errors import OperatorError
from gossamer.protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gossamer.peer.trainer.ranks import Ranks  # loaded only for several devices

FORMATS: Final = {torch.float32: "fp32", torch.bfloat16: "bf16"}
OUT_OF_MEMORY: Final = "out of memory"


class InnerLoop:
    """The inner steps of one model, on its device or on several. The model's tensors are written to. Belongs to one thread."""

    def __init__(
        self,
        manifest: Manifest,
        model: PreTrainedModel,
        corpus: Corpus,
        computing: Computing,
        emit: Callable[[Event], None],
        devices: Ranks | None = None,
    ) -> None:
        self.parameters: dict[str, Tensor] = state_tensors(model)
        self.device = next(iter(self.parameters.values())).device
        self.devices: OneDevice | Ranks = devices or OneDevice(manifest, model, optimizer_on_host=computing.optimizer_on_host)
        self.computing = replace(computing, micro_batch=computing.micro_batch or computing.rows(manifest.inner.batch_size))
        self.waited_s = 0.0  # for work: a batch is always there
        self._model = model
        self._corpus = corpus
        self._emit = emit
        self._clip_norm = manifest.inner.clip_norm
        self._ahead: tuple[int, tuple[Tensor, int]] | None = None  # the batch of a step to come, on its way to the device

    def emit_computing(self, reason: str) -> None:
        """Emit how this peer computes, and why."""
        self._emit(computing_set(self.computing, reason))

    def gradient(self, step: int, seed: int) -> tuple[Tensor, Tensor, int]:
        """Compute a batch's clipped gradient; return mean loss (nats per token), length before clipping, tokens that train.

        Raises OperatorError.
        """
        batch, num_trained = self._batch(step)
        while (loss := self.devices.backward(batch, seed, self.computing)) is None:
            self._use_less()
        norm = self.devices.clip(self._clip_norm)
        self._ahead = step + 1, self._sent(step + 1)
        return loss, norm, num_trained

    def forget_batch(self) -> None:
        """Forget the batch that was fetched ahead: the text continues at another place."""
        self._ahead = None

    def _use_less(self) -> None:
        if self.computing.micro_batch > 1:
            self.computing = replace(self.computing, micro_batch=-(-self.computing.micro_batch // 2))
        elif not self.computing.optimizer_on_host and has_own_memory(self.device.type):
            self.computing = replace(self.computing, optimizer_on_host=True)
        elif not self.computing.recompute and can_recompute(self._model):
            self.computing = replace(self.computing, recompute=True)
        else:
            raise OperatorError(
                f"not even one sequence of this run fits into the memory of {self.device} beside the model",
                hint="close other programs that use that memory, choose other --devices, or join a run with shorter sequences",
            )
        self.emit_computing(OUT_OF_MEMORY)

    def _batch(self, step: int) -> tuple[Tensor, int]:
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] == step else self._sent(step)

    def _sent(self, step: int) -> tuple[Tensor, int]:
        """Begin to copy a batch to the device; return it, and how many of its tokens train, counted on the host."""
        batch = self._corpus.batch(step)
        return self.devices.send(batch), int(num_targets(batch))


def computing_set(how: Computing, reason: str) -> ComputingSet:
    """Return the event that says how a peer computes, and why."""
    return ComputingSet(FORMATS[how.dtype], how.num_devices, how.micro_batch, how.recompute, how.compiles, reason, how.optimizer_on_host)
