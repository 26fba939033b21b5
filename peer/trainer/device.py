"""The model on one device: the gradient of a batch, its length, and the optimizer's step; and what several devices offer alike.

Nothing here knows of the text, the run's clock or outer steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gossamer.optim.inner import build_optimizer, set_learning_rate
from gossamer.peer.model.computing import Computing, compile_blocks, is_out_of_memory, next_token_loss, recompute_blocks
from gossamer.peer.model.plan import inner_settings
from gossamer.protocol.run.manifest import Manifest


class Devices(Protocol):
    """Where a model trains: one device, or several (ranks.py). Its parameters are written to; all belongs to one thread."""

    moved: Mapping[str, Tensor]
    """The parameters whose optimizer is in this process: of these, the next step changes what `state` returned."""

    def send(self, batch: Tensor) -> Tensor:
        """Send a batch on its way to where it is computed: int64[B, L+1], which may still be computing something else."""
        ...

    def backward(self, batch: Tensor, seed: int, computing: Computing) -> Tensor | None:
        """Compute a batch's gradient and return its mean loss, nats per token. None, with no gradient left, where memory runs out.

        Seeds torch's generators, from which dropout draws.
        """
        ...

    def clip(self, most: float) -> Tensor:
        """Make the gradient at most so long; return its length before."""
        ...

    def step(self, rate: float) -> None:
        """Let the optimizer take its step with the gradient."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return what the optimizer keeps, by `KEY/PARAMETER`."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Give the optimizer back what `state` returned."""
        ...

    def forget(self) -> None:
        """Let the optimizer begin anew: the weights are others'."""
        ...

    def cpu_s(self) -> float:
        """Return the processor time of what runs beside this process."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class OneDevice:
    """A model on one device, with the optimizer of the parameters that are moved here: all of them, unless told which."""

    def __init__(self, manifest: Manifest, model: PreTrainedModel, moved: Collection[str] | None = None) -> None:
        self.model = model
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.moved: Mapping[str, Tensor] = {
            name: parameter for name, parameter in self.parameters.items() if moved is None or name in moved
        }
        self.device = next(iter(self.parameters.values())).device
        self.gradients: tuple[Tensor, ...] = ()  # flat ones, of which the parameters' are parts and remain so
        self._optimizer = build_optimizer(manifest.inner.optimizer, self.moved.items(), inner_settings(manifest))
        self._recomputes = self._compiles = False

    def send(self, batch: Tensor) -> Tensor:
        """As Devices.send."""
        return batch.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else batch.to(self.device)

    def backward(self, batch: Tensor, seed: int, computing: Computing) -> Tensor | None:
        """As Devices.backward."""
        return self.part(batch, len(batch), seed, computing)

    def part(self, rows: Tensor, num_rows: int, seed: int, computing: Computing) -> Tensor | None:
        """Compute what some rows add to the gradient of a batch of `num_rows`; return what they add to its loss. As Devices.backward."""
        self._compute_as(computing)
        self._clear()
        try:
            return self._accumulated(rows, num_rows, seed, computing)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self._clear()  # here, where the error no longer holds what the step had made
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def clip(self, most: float) -> Tensor:
        """As Devices.clip."""
        return torch.nn.utils.clip_grad_norm_(self.moved.values(), most)

    def step(self, rate: float) -> None:
        """As Devices.step."""
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """As Devices.state."""
        kept = self._optimizer.state
        return {f"{key}/{name}": value for name, parameter in self.moved.items() for key, value in kept.get(parameter, {}).items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """As Devices.restore; where each value has to lie, the optimizer knows itself."""
        states: dict[str, dict[str, Tensor]] = {}
        for full, value in state.items():
            key, name = full.split("/", 1)
            states.setdefault(name, {})[key] = value.clone()
        names = {parameter: name for name, parameter in self.moved.items()}
        order = [names[parameter] for group in self._optimizer.param_groups for parameter in group["params"]]
        numbered = {number: states[name] for number, name in enumerate(order) if name in states}
        self._optimizer.load_state_dict({"state": numbered, "param_groups": self._optimizer.state_dict()["param_groups"]})

    def forget(self) -> None:
        """As Devices.forget."""
        self._optimizer.state.clear()

    def cpu_s(self) -> float:
        """As Devices.cpu_s: there is nothing."""
        return 0.0

    def close(self) -> None:
        """As Devices.close: there is nothing."""

    def _accumulated(self, rows: Tensor, num_rows: int, seed: int, computing: Computing) -> Tensor:
        _seed_generators(self.device, seed)
        losses = [torch.zeros((), device=self.device)]  # a device may have no rows
        for part in torch.split(rows, computing.micro_batch or num_rows) if len(rows) else ():
            loss = next_token_loss(self.model, part, computing.dtype) * (len(part) / num_rows)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _clear(self) -> None:
        for flat in self.gradients:
            flat.zero_()
        if not self.gradients:
            self._optimizer.zero_grad(set_to_none=True)

    def _compute_as(self, computing: Computing) -> None:
        if computing.recompute and not self._recomputes:
            recompute_blocks(self.model)
        if computing.compiles and not self._compiles:
            compile_blocks(self.model)
        self._recomputes, self._compiles = computing.recompute, computing.compiles


def keep_within(device: torch.device, num_bytes: float) -> None:
    """Make a GPU this process's own, and have torch take no more memory than this there; more is an error of the step that asks for it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cuda" and math.isfinite(num_bytes):
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)


def _seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators that an inner step draws from; torch.manual_seed writes down a stack trace for every backend that is absent."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
