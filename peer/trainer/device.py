"""The model on one device: the gradient of a batch, its length, and the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from gossamer.optim.resting import DeviceOptimizer, HostOptimizer
from gossamer.peer.model.accelerator import has_own_memory, limit_memory
from gossamer.peer.model.adapter import trained_parameters
from gossamer.peer.model.computing import Computing, compile_blocks, is_out_of_memory, next_token_loss, recompute_blocks
from gossamer.peer.model.plan import inner_settings
from gossamer.peer.text.labels import num_targets
from gossamer.protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T", DeviceOptimizer, HostOptimizer)


class OneDevice:
    """A model on one device, and the optimizer of the parameters `moved`, by default all; belongs to one thread. Ranks does the same.

    With `optimizer_on_host` the optimizer's state rests on the host from the start, else from the first batch whose Computing says so.
    """

    def __init__(
        self, manifest: Manifest, model: PreTrainedModel, moved: Collection[str] | None = None, optimizer_on_host: bool = False
    ) -> None:
        self.model = model
        self.parameters: Mapping[str, Tensor] = trained_parameters(model)
        self.moved: Mapping[str, Tensor] = {name: self.parameters[name] for name in (self.parameters if moved is None else moved)}
        self.device = next(iter(self.parameters.values())).device
        self.gradients: tuple[Tensor, ...] = ()  # flat tensors, into which the parameters' gradients are views, if a rank lays them out so
        self._manifest = manifest
        self._optimizer: DeviceOptimizer | HostOptimizer = self._new_optimizer(DeviceOptimizer)
        if optimizer_on_host:
            self._rest_on_host()
        self._recomputes = self._compiles = False

    def send(self, batch: Tensor) -> Tensor:
        """Begin to copy a batch, int64[B, L+1], to the device, which may still be computing."""
        return batch.pin_memory().to(self.device, non_blocking=True) if has_own_memory(self.device.type) else batch.to(self.device)

    def backward(self, rows: Tensor, seed: int, computing: Computing, batch: Tensor | None = None) -> Tensor | None:
        """Compute the part of some rows in the gradient and the mean loss, nats per token, of a batch; None: these are all of its rows.

        Return their part of the loss; None, with no gradient left, where memory runs out. Seeds torch's generators, for dropout.
        """
        self.compute_as(computing)
        self.clear()
        try:
            return self._accumulated(rows, rows if batch is None else batch, seed, computing)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self.clear()  # outside `except`, where the error no longer holds the step's tensors
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        return None

    def clip(self, most: float) -> Tensor:
        """Scale the gradient to at most this length; return the length before."""
        return torch.nn.utils.clip_grad_norm_(self.moved.values(), most)

    def scale(self, factor: float) -> None:
        """Multiply the gradient by a factor."""
        for parameter in self.moved.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def step(self, rate: float) -> None:
        """Let the optimizer take its step with the gradient."""
        self._optimizer.step(rate)

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors, by `KEY/PARAMETER`."""
        return self._optimizer.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; each value goes where the optimizer keeps it."""
        self._optimizer.restore(state)

    def forget(self) -> None:
        """Clear the optimizer's state: the weights are another peer's."""
        self._optimizer.forget()

    def cpu_s(self) -> float:
        """Return the processor time of the processes beside this one: there are none."""
        return 0.0

    def close(self) -> None:
        """Free the device: there is nothing to free."""

    def _accumulated(self, rows: Tensor, batch: Tensor, seed: int, computing: Computing) -> Tensor:
        seed_generators(self.device, seed)
        losses = [torch.zeros((), device=self.device)]  # a rank may have no rows
        num_all = num_targets(batch).to(self.device)
        for part in torch.split(rows, computing.micro_batch or len(batch)) if len(rows) else ():
            loss = next_token_loss(self.model, part, computing.dtype) * (num_targets(part) / num_all)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def clear(self) -> None:
        """Clear the gradient."""
        for flat in self.gradients:
            flat.zero_()
        if not self.gradients:
            self._optimizer.clear_gradients()

    def _new_optimizer(self, kind: type[T]) -> T:
        return kind(self._manifest.inner.optimizer, self.moved, inner_settings(self._manifest))

    def _rest_on_host(self) -> None:
        """From now on, keep the optimizer's state on the host between steps, if the device has memory of its own."""
        if has_own_memory(self.device.type) and isinstance(self._optimizer, DeviceOptimizer):
            hosted = self._new_optimizer(HostOptimizer)
            hosted.restore(self._optimizer.state())
            self._optimizer = hosted

    def compute_as(self, computing: Computing) -> None:
        """Compile the blocks, let them recompute activations, or let the optimizer rest on the host, from now on, if asked to."""
        if computing.optimizer_on_host:
            self._rest_on_host()
        if computing.recompute and not self._recomputes:
            recompute_blocks(self.model)
        if computing.compiles and not self._compiles:
            compile_blocks(self.model)
        self._recomputes, self._compiles = computing.recompute, computing.compiles


def keep_within(device: torch.device, num_bytes: float) -> None:
    """Select a GPU for this process and limit torch's memory there; a step that needs more raises torch.OutOfMemoryError.

    Raises BadSettings where torch has no such limit.
    """
    if device.type == "cpu":
        return
    torch.accelerator.set_device_index(device)
    if math.isfinite(num_bytes):
        limit_memory(device, num_bytes)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators that an inner step draws from; torch.manual_seed records a stack trace for every absent backend."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
