"""Muon for the matrices inside the blocks, AdamW for everything else, as one optimizer.

Muon (Keller Jordan, 2024; as the inner optimizer of DiLoCo: MuLoCo, arXiv 2505.23725): momentum, then the nearest orthogonal matrix by
five Newton-Schulz steps, then a step whose root mean square is 0.2, like AdamW's (Moonlight, arXiv 2502.16982): so both parts share
one learning rate and one weight decay. Which parameters are matrices of the blocks: two dimensions, and a name of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from optim.fragments import BLOCK_NAME
from optim.inner import InnerSettings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
UPDATE_SIZE = 0.2


class Muon(torch.optim.Optimizer):
    """Groups with `orthogonal` set take Muon's step, the others AdamW's.

    State per parameter: `momentum`, or `mean`, `square` and `step`.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: InnerSettings, momentum: float = 0.95) -> None:
        defaults = {"lr": settings.learning_rate, "momentum": momentum, "betas": (settings.beta1, settings.beta2), "eps": 1e-8}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step. Raises ValueError for a closure."""
        if closure is not None:
            raise ValueError("This optimizer takes no closure.")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                rule = self._orthogonal if group["orthogonal"] else self._adam
                rule(parameter, parameter.grad, self.state[parameter], group)

    def _orthogonal(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(gradient, 1.0 - group["momentum"])
        direction = orthogonalized(gradient.lerp(momentum, group["momentum"]))
        parameter.add_(direction, alpha=-group["lr"] * UPDATE_SIZE * math.sqrt(max(parameter.shape)))

    def _adam(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state |= {"step": torch.zeros(()), "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
        beta1, beta2 = group["betas"]
        state["step"] += 1
        state["mean"].lerp_(gradient, 1.0 - beta1)
        state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        num_steps = float(state["step"])
        scale = (state["square"] / (1.0 - beta2**num_steps)).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["mean"], scale, value=-group["lr"] / (1.0 - beta1**num_steps))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return about the nearest matrix with orthonormal rows (or columns): f32[m, n], singular values between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    x: Tensor = wide / wide.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.t()


def build_muon(parameters: Iterable[tuple[str, Tensor]], settings: InnerSettings) -> Muon:
    """Build Muon over named parameters; weight decay as in `build_adamw`. Those that do not require a gradient are left out."""
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    hidden = [parameter for name, parameter in trained if parameter.dim() == 2 and BLOCK_NAME.search(name)]
    inside = {id(parameter) for parameter in hidden}
    others = [parameter for _, parameter in trained if id(parameter) not in inside]
    groups = [
        {"params": hidden, "weight_decay": settings.weight_decay, "orthogonal": True},
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": settings.weight_decay, "orthogonal": False},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, "orthogonal": False},
    ]
    return Muon([group for group in groups if group["params"]], settings)
