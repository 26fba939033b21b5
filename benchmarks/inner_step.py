"""What parts of an inner step cost in processor time, one way beside the other, in one run: medians of rounds that take turns.

    python -m benchmarks.inner_step [--rounds N] [--json]

The demo's matrices and parameters, on one thread: Newton-Schulz one matrix at a time, matrices of one shape together, and the same in bf16;
torch's AdamW parameter by parameter, and in one kernel. And how far off a loss in bf16 is that torch's `linear_cross_entropy` gives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gossamer.optim.inner import orthogonalized
from gossamer.peer.model.computing import blocks
from gossamer.peer.model.model import build_model
from gossamer.protocol.run.manifest import Manifest


def one_at_a_time(matrices: list[Tensor]) -> None:
    """Orthogonalize each matrix by itself."""
    for matrix in matrices:
        orthogonalized(matrix[None])


def together(matrices: list[Tensor]) -> None:
    """Orthogonalize matrices of one shape at once."""
    for shape in {matrix.shape for matrix in matrices}:
        orthogonalized(torch.stack([matrix for matrix in matrices if matrix.shape == shape]))


def adamw_step(parameters: list[Tensor], *, fused: bool) -> Callable[[], None]:
    """Return a step of torch's AdamW."""
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for parameter in copies:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(copies, fused=fused, foreach=False if not fused else None)
    return lambda: optimizer.step() and None


def processor_ms(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median processor milliseconds of each way."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start_s = time.process_time()
            way()
            spent[name].append(1000 * (time.process_time() - start_s))
    return {name: statistics.median(times) for name, times in spent.items()}


def losses_in_bf16() -> dict[str, float]:
    """Return how far a loss in bf16 is off: by torch's own function, and by products in bf16 with the rest in f32."""
    draws = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(1024, 256, generator=draws), 0.05 * torch.randn(8192, 256, generator=draws)
    targets = torch.randint(0, 8192, (1024,), generator=draws)
    exact = float(functional.cross_entropy(hidden @ head.T, targets))
    low = hidden.bfloat16(), head.bfloat16()
    torchs = functional.linear_cross_entropy(*low, targets, options=torch.nn.LinearCrossEntropyOptions())
    return {
        "torch's linear_cross_entropy": float(torchs) - exact,
        "products in bf16": float(functional.cross_entropy((low[0] @ low[1].T).float(), targets)) - exact,
    }


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(Manifest.checked({}).model, 0)
    parameters = list(model.parameters())
    inside = [parameter.detach() for block in blocks(model) for parameter in block.parameters() if parameter.dim() == 2]
    matrices = [matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T for matrix in inside]
    in_bf16 = [matrix.bfloat16() for matrix in matrices]
    ways: dict[str, Callable[[], object]] = {
        f"Newton-Schulz, {len(matrices)} matrices, one at a time": lambda: one_at_a_time(matrices),
        "  those of one shape together": lambda: together(matrices),
        "  one at a time, in bf16": lambda: one_at_a_time(in_bf16),
        "  together, in bf16": lambda: together(in_bf16),
        f"AdamW, {len(parameters)} parameters, one at a time": adamw_step(parameters, fused=False),
        "  in one kernel": adamw_step(parameters, fused=True),
    }
    spent, off = processor_ms(ways, given.rounds), losses_in_bf16()
    if given.json:
        print(json.dumps({"processor_ms": spent, "loss_off_by": off}))
        return
    for name, milliseconds in spent.items():
        print(f"{name:<52}{milliseconds:>8.2f} ms")
    for name, nats in off.items():
        print(f"loss in bf16, {name:<38}{nats:>+8.4f} nats")


if __name__ == "__main__":
    main()
