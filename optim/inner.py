"""The inner optimizers by the name in the manifest, and a learning rate that follows the run's clock.

adamw: torch's; weight decay only on tensors of two or more dimensions.
muon:  Muon (Keller Jordan, 2024; MuLoCo, arXiv 2505.23725) for the matrices inside the blocks, torch's AdamW for everything else. Its step
       has the root mean square 0.2, like AdamW's (Moonlight, arXiv 2502.16982), so both parts share learning rate and weight decay.
       Its momentum decays by `momentum`, which is less here than in the paper (docs/decisions/2026-11-27-momentum.md).

Learning rate: warm-up, then cosine over the global step of the run. A peer that joins late ramps up again over its own first steps
(re-warming, arXiv 2308.04014).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.optim.fragments import BLOCK_NAME
from gossamer.optim.names import look_up

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a Newton-Schulz step
NUM_ITERATIONS = 5
BF16_KINDS = ("cuda", "xpu")  # devices whose bf16 matrix products are faster; `cuda` is ROCm too
UPDATE_SIZE = 0.2
# Values orthogonalized at once. On a GPU: about 0.5 GB with the temporaries. On a CPU: only matrices so small that the call dominates.
STACK_VALUES, STACK_VALUES_CPU = 1 << 26, 1 << 16


@dataclass(frozen=True, slots=True)
class InnerSettings:
    """The inner optimizer's constants. Raises ValueError for values that cannot train."""

    total_steps: int
    learning_rate: float = 2e-3
    final_fraction: float = 0.1
    warmup_steps: int = 50
    rewarm_steps: int = 20
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if self.total_steps < 1 or self.warmup_steps < 0 or self.rewarm_steps < 0:
            raise ValueError("total_steps must be at least 1, warmup_steps and rewarm_steps at least 0.")
        if not (self.learning_rate > 0.0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"learning_rate must be positive and finite, and is {self.learning_rate}.")
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ValueError(f"final_fraction must lie in [0, 1], and is {self.final_fraction}.")
        if not (0.0 <= self.beta1 < 1.0 and 0.0 <= self.beta2 < 1.0 and self.weight_decay >= 0.0):
            raise ValueError("beta1 and beta2 must lie in [0, 1), and weight_decay must not be negative.")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), and is {self.momentum}.")


def learning_rate(global_step: int, steps_since_join: int, settings: InnerSettings) -> float:
    """Return the learning rate of the next inner step.

    `global_step` is the global step before the inner step. `steps_since_join` counts the peer's own steps since it received a partner's
    weights (a founder passes its global step). The cosine ends at `final_fraction` of the peak after `total_steps`.
    """
    ramp = min(_ramp(global_step, settings.warmup_steps), _ramp(steps_since_join, settings.rewarm_steps))
    falling_steps = max(1, settings.total_steps - settings.warmup_steps)
    progress = min(1.0, max(0.0, (global_step - settings.warmup_steps) / falling_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.learning_rate * ramp * (settings.final_fraction + (1.0 - settings.final_fraction) * cosine)


def _ramp(done_steps: int, ramp_steps: int) -> float:
    return 1.0 if done_steps >= ramp_steps else (done_steps + 1) / (ramp_steps + 1)


def build_optimizer(name: str, parameters: Iterable[tuple[str, Tensor]], settings: InnerSettings) -> torch.optim.Optimizer:
    """Build the inner optimizer of that name over the parameters that require a gradient. Raises ValueError with a suggestion."""
    build = look_up("inner optimizer", name, OPTIMIZERS)
    return build([(name, parameter) for name, parameter in parameters if parameter.requires_grad], settings)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = value


class Muon(torch.optim.Optimizer):
    """Muon: groups with `orthogonal` set take its step and keep `momentum`, the others do as torch's AdamW."""

    def __init__(self, groups: list[dict[str, Any]], settings: InnerSettings) -> None:
        super().__init__(groups, {"lr": settings.learning_rate})
        self._momentum = settings.momentum
        others = self._groups(orthogonal=False)
        self._adamw = _adamw(others, settings) if others else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step. Raises ValueError for a closure."""
        if closure is not None:
            raise ValueError("This optimizer takes no closure.")
        for group in self._groups(orthogonal=True):
            for parameters in _stacks_of_one_shape([parameter for parameter in group["params"] if parameter.grad is not None]):
                self._step_orthogonal(parameters, group["lr"], group["weight_decay"])
        if self._adamw is not None:  # load_state_dict may have replaced groups and state
            self._adamw.param_groups, self._adamw.state = self._groups(orthogonal=False), self.state
            self._adamw.step()

    def _groups(self, *, orthogonal: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["orthogonal"] is orthogonal]

    def _step_orthogonal(self, parameters: list[Tensor], rate: float, weight_decay: float) -> None:
        directions = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum = state["momentum"].lerp_(gradient_of(parameter), 1.0 - self._momentum)
            directions.append(_as_wide(gradient_of(parameter).lerp(momentum, self._momentum)))
        orthogonal = orthogonalized(torch.stack(directions) if len(directions) > 1 else directions[0][None])
        for parameter, direction in zip(parameters, orthogonal.unbind(), strict=True):
            length = rate * UPDATE_SIZE * math.sqrt(max(parameter.shape))
            parameter.mul_(1.0 - rate * weight_decay).add_(direction if _is_wide(parameter) else direction.mT, alpha=-length)


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[-2] <= matrix.shape[-1]


def _as_wide(matrix: Tensor) -> Tensor:
    return matrix if _is_wide(matrix) else matrix.mT


def _stacks_of_one_shape(parameters: list[Tensor], device: torch.device | None = None) -> Iterator[list[Tensor]]:
    """Sort matrices into stacks of one shape, up to transposition; a matrix alone where a stack gains nothing."""
    shapes: dict[tuple[torch.device, int, int], list[Tensor]] = {}
    for parameter in parameters:
        low, high = sorted(parameter.shape)
        shapes.setdefault((device or parameter.device, low, high), []).append(parameter)
    for (place, low, high), alike in shapes.items():
        count = max(1, (STACK_VALUES_CPU if place.type == "cpu" else STACK_VALUES) // (low * high))
        yield from (alike[first : first + count] for first in range(0, len(alike), count))


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return approximately the nearest matrices with orthonormal rows: f32[k, m, n] with m <= n, singular values between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    x: Tensor = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = x.bfloat16() if x.device.type in BF16_KINDS else x  # as Muon's authors do
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def _build_adamw(named: list[tuple[str, Tensor]], settings: InnerSettings) -> torch.optim.Optimizer:
    return _adamw(_decay_groups([parameter for _, parameter in named], settings), settings)


def _adamw(groups: list[dict[str, Any]], settings: InnerSettings) -> torch.optim.AdamW:
    """Build torch's AdamW, fused where torch has a fused kernel for these parameters."""
    types = {(parameter.device.type, parameter.dtype) for group in groups for parameter in group["params"]}
    is_fused = types <= {(kind, torch.float32) for kind in ("cpu", *BF16_KINDS)}
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), fused=is_fused)


def _build_muon(named: list[tuple[str, Tensor]], settings: InnerSettings) -> torch.optim.Optimizer:
    hidden = [parameter for name, parameter in named if _is_hidden(name, parameter.shape)]
    others = [parameter for name, parameter in named if not _is_hidden(name, parameter.shape)]
    matrices = [{"params": hidden, "weight_decay": settings.weight_decay, "orthogonal": True}] if hidden else []
    return Muon(matrices + [group | {"orthogonal": False} for group in _decay_groups(others, settings)], settings)


def _is_hidden(name: str, shape: Sequence[int]) -> bool:
    return len(shape) == 2 and BLOCK_NAME.search(name) is not None


def orthogonal_stacks(name: str, parameters: Mapping[str, Tensor], device: torch.device | None = None) -> Iterator[list[str]]:
    """Yield the names of the matrices that the optimizer of that name orthogonalizes together, as on `device`, by default their own."""
    hidden = {parameter: key for key, parameter in parameters.items() if name == "muon" and _is_hidden(key, parameter.shape)}
    for stack in _stacks_of_one_shape(list(hidden), device):
        yield [hidden[parameter] for parameter in stack]


def num_state_values(name: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of values that the optimizer of that name keeps for parameters of these shapes, without its step counters."""
    one = {key for key, shape in shapes.items() if name == "muon" and _is_hidden(key, shape)}
    return sum((1 if key in one else 2) * math.prod(shape) for key, shape in shapes.items())


def divide_parameters(name: str, shapes: Mapping[str, tuple[int, ...]], count: int) -> list[list[str]]:
    """Divide whole parameters among `count` optimizers with about equal work; return the names for each, in the given order.

    Muon's matrices are divided by the work of a Newton-Schulz step, then the rest by number of values.
    """
    matrices = {key: math.prod(shape) * min(shape) for key, shape in shapes.items() if name == "muon" and _is_hidden(key, shape)}
    others = sorted(shapes.keys() - matrices.keys(), key=lambda key: (-math.prod(shapes[key]), key))
    work, values, shares = [0] * count, [0] * count, [set[str]() for _ in range(count)]
    for load, keys in ((work, sorted(matrices, key=lambda key: -matrices[key])), (values, others)):
        for key in keys:
            least = min(range(count), key=load.__getitem__)
            work[least] += matrices.get(key, 0)
            values[least] += math.prod(shapes[key])
            shares[least].add(key)
    return [[key for key in shapes if key in share] for share in shares]


def _decay_groups(parameters: list[Tensor], settings: InnerSettings) -> list[dict[str, Any]]:
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


Build = Callable[[list[tuple[str, Tensor]], InnerSettings], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, Build] = {"adamw": _build_adamw, "muon": _build_muon}
