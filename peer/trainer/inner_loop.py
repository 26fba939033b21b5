"""The inner loop of one replica: a batch's gradient, in as many parts as the memory asks for, and the optimizer's step.

The gradient is the mean over the whole batch whatever the parts, so how it is cut is each peer's own affair. Where memory runs out, the
same batch is tried again in smaller parts, at last with activations computed again instead of kept. The next batch is fetched while the
device still computes. Nothing here knows of the run's clock or of outer steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optim.inner import build_optimizer, set_learning_rate
from peer.machine.events import ComputingSet, Event
from peer.model.computing import Computing, compile_blocks, is_out_of_memory, next_token_loss, recompute_blocks
from peer.model.plan import inner_settings
from peer.text.corpus import Corpus
from protocol.errors import OperatorError
from protocol.run.manifest import Manifest

FORMATS: Final = {torch.float32: "fp32", torch.bfloat16: "bf16"}
OUT_OF_MEMORY: Final = "the memory ran out"


class InnerLoop:
    """The inner steps of one model. Its tensors are written to; all belongs to one thread."""

    def __init__(
        self, manifest: Manifest, model: PreTrainedModel, corpus: Corpus, computing: Computing, emit: Callable[[Event], None]
    ) -> None:
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.device = next(iter(self.parameters.values())).device
        self.optimizer = build_optimizer(manifest.inner.optimizer, self.parameters.items(), inner_settings(manifest))
        self.computing = replace(computing, micro_batch=computing.micro_batch or manifest.inner.batch_size)
        self._model = model
        self._corpus = corpus
        self._emit = emit
        self._clip_norm = manifest.inner.clip_norm
        self._ahead: tuple[int, Tensor] | None = None  # the batch of a step to come, on its way to the device
        if computing.recompute:
            recompute_blocks(model)
        if computing.compiles:
            compile_blocks(model)

    def tell(self, reason: str) -> None:
        """Tell how this peer computes."""
        computing = self.computing
        self._emit(ComputingSet(FORMATS[computing.dtype], computing.micro_batch, computing.recompute, computing.compiles, reason))

    def gradient(self, step: int, seed: int) -> tuple[Tensor, Tensor, int]:
        """Compute the clipped gradient of a step's batch; return its mean loss, nats per token, its length before, and the batch's tokens.

        Seeds torch's generators, from which dropout draws. Raises OperatorError when not even one sequence fits into the memory.
        """
        batch = self._batch(step)
        while True:
            try:
                loss = self._accumulated(batch, seed)
                break
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            self._use_less()  # here, where the error no longer holds what the step had made
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._clip_norm)
        self._ahead = step + 1, self._fetched(step + 1)
        return loss, norm, batch.shape[0] * (batch.shape[1] - 1)

    def step(self, rate: float) -> None:
        """Let the optimizer take its step with the gradient."""
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()

    def forget_batch(self) -> None:
        """Let go of what was fetched ahead: the text goes on from elsewhere."""
        self._ahead = None

    def _accumulated(self, batch: Tensor, seed: int) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        seed_generators(self.device, seed)
        losses = []
        for part in torch.split(batch, self.computing.micro_batch):
            loss = next_token_loss(self._model, part, self.computing.dtype) * (len(part) / len(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _use_less(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.computing.micro_batch > 1:
            self.computing = replace(self.computing, micro_batch=-(-self.computing.micro_batch // 2))
        elif not self.computing.recompute and recompute_blocks(self._model):
            self.computing = replace(self.computing, recompute=True)
        else:
            raise OperatorError(
                f"not even one sequence of this run fits into the memory of {self.device} beside the model",
                hint="close what else uses that memory, use another --device, or take a run with shorter sequences",
            )
        self.tell(OUT_OF_MEMORY)

    def _batch(self, step: int) -> Tensor:
        """Return the batch of a step on the device."""
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] == step else self._fetched(step)

    def _fetched(self, step: int) -> Tensor:
        """Send a batch on its way to the device, which may still be computing."""
        batch = self._corpus.batch(step)
        return batch.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else batch.to(self.device)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators that an inner step draws from; torch.manual_seed writes down a stack trace for every backend that is absent."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
