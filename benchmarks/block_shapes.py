"""How long the modulo codec's blocks and sketches should be: what each choice loses of a real gap, at 4 bits.

    python -m benchmarks.block_shapes [--inner-steps N] [--periods N] [--kappa K] [--mended N]

The gap is that of `benchmarks.gap_error`. This is the codec's idea in float64: rotate each block, guess its scale from the first values (a
quarter) and those of its neighbours (three quarters), count a block as lost when more values than `--mended` lie outside the window (the
check bits mend a single one today), and everything else as the window's rounding noise. `bits` adds the sketch and 16 check bits per block
to the 4. Half a minute.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gap_error import last_messages

SHAPES = ((256, 2), (512, 4), (1024, 4), (1024, 8), (1024, 11), (1024, 16), (2048, 16), (2048, 22), (4096, 32), (4096, 64))
BITS = 4
REACH = 4096  # values on either side whose blocks help to guess a scale


def rotated(gap: Tensor, block: int, generator: torch.Generator) -> Tensor:
    """Return the randomized Hadamard transform of each block, f64[blocks, block]; the last one is padded with zeros."""
    rows = functional.pad(gap.double(), (0, -gap.numel() % block)).view(-1, block)
    rows = rows * (2 * torch.randint(0, 2, rows.shape, generator=generator) - 1)
    width = 1
    while width < block:
        halves = rows.view(len(rows), -1, 2, width)
        rows = torch.stack((halves[:, :, 0] + halves[:, :, 1], halves[:, :, 0] - halves[:, :, 1]), dim=2).reshape(len(rows), block)
        width *= 2
    return rows.div_(block**0.5)


def guessed_scale(rows: Tensor, num_sketched: int, neighbours: int) -> Tensor:
    """Return each block's guess of its standard deviation, f64[blocks]."""
    square = rows[:, :num_sketched].square().mean(1)
    kernel = torch.ones(1, 1, 2 * neighbours + 1, dtype=torch.float64)
    total, count = (
        functional.conv1d(values.view(1, 1, -1), kernel, padding=neighbours).view(-1) for values in (square, torch.ones_like(square))
    )
    return (0.25 * square + 0.75 * total / count).sqrt()


def losses(gaps: list[Tensor], block: int, num_sketched: int, kappa: float, num_mended: int) -> tuple[float, float]:
    """Return the shares of the gap's energy that are lost in blocks outside the window, and that come back as noise."""
    generator = torch.Generator().manual_seed(0)
    lost = noise = energy = 0.0
    for gap in gaps:
        rows = rotated(gap, block, generator)
        window = kappa * guessed_scale(rows, num_sketched, max(1, REACH // block))
        step = 2.0 * window / 2**BITS
        outside = (rows.abs() > (window - step)[:, None]).sum(1) > num_mended  # each side rounds by up to half a step
        squares = rows.square().sum(1)
        lost += float(squares[outside].sum())
        noise += float((2.0 * block * step.square() / 12.0)[~outside].sum())
        energy += float(squares.sum())
    return lost / energy, noise / energy


def main() -> None:
    """Print one row per shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--periods", type=int, default=12)
    parser.add_argument("--kappa", type=float, default=5.5)
    parser.add_argument("--mended", type=int, default=1, help="values outside the window that a block survives")
    given = parser.parse_args()
    gaps = [(there - here)[: fragment.num_coded] for fragment, (here, there) in last_messages(given.inner_steps, given.periods)]
    print(f"{'block':>6}{'sketch':>8}{'bits':>7}{'lost':>9}{'noise':>9}{'together':>10}")
    for block, num_sketched in SHAPES:
        lost, noise = losses(gaps, block, num_sketched, given.kappa, given.mended)
        bits = BITS + 16 * (num_sketched + 1) / block
        print(f"{block:>6}{num_sketched:>8}{bits:>7.2f}{lost:>9.4f}{noise:>9.4f}{lost + noise:>10.4f}")


if __name__ == "__main__":
    main()
