"""Sketches: the gap scale between two messages, block by block, from 8 rotated values of each.

A sketch is the first 8 values of each rotated block (optim/codecs/hadamard), as fp16. From both sketches both sides compute the same
steps, bit for bit: in float64, element by element and in a fixed order, since a reduction's order differs between machines. IEEE 754
defines each of these operations to the bit. CPUs and CUDA devices follow it. Other devices may lack float64: for those the CPU computes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gossamer.optim.codecs.interface import aligned, require_payload

VALUES = 8
BYTES = 2 * VALUES
NEIGHBOURS = 4
FP16_LARGEST = 65504.0


def to_bytes(values: Tensor) -> Tensor:
    """Return uint8[blocks * 16] for f32[blocks, 8], which is overwritten; values outside fp16 are clamped to its largest number."""
    return values.clamp_(-FP16_LARGEST, FP16_LARGEST).half().view(-1).view(torch.uint8)


def quantization_steps(own_sketch: Tensor, partner_sketch: Tensor, num_blocks: int, steps_per_sigma: float) -> Tensor:
    """Return each block's step, f32[num_blocks], the same on both sides; computed on the CPU, or on the own sketch's CUDA device.

    sigma^2 is one quarter of the block's own mean square difference plus three quarters of the mean over the blocks around it: the 8
    values of one block alone are 25 % off, and neighbours are alike. sigma^2 never falls below the resolution of fp16. Raises ValueError
    for a sketch of another size or one that is not finite.
    """
    is_cuda = own_sketch.device.type == "cuda" and torch.version.hip is None  # no other device is known to round f64 as the CPU does
    device = own_sketch.device if is_cuda else torch.device("cpu")
    own, partner = (_read(sketch.to(device), num_blocks) for sketch in (own_sketch, partner_sketch))
    square = _row_mean((own - partner) * (own - partner))
    floor = _row_mean(own * own + partner * partner) * 2.0**-24 + 2.0**-48
    variance = torch.maximum(0.25 * square + 0.75 * _mean_around(square), _mean_around(floor))
    return (torch.sqrt(variance) * steps_per_sigma).float()


def _read(sketch: Tensor, num_blocks: int) -> Tensor:
    """Return f64[num_blocks, 8]."""
    require_payload(sketch, BYTES * num_blocks, "sketch")
    values = aligned(sketch, 2).view(torch.float16).view(num_blocks, VALUES).double()
    if not bool(torch.isfinite(values).all()):
        raise ValueError("The sketch holds values that are not finite.")
    return values


def _row_mean(values: Tensor) -> Tensor:
    total = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    for column in values.unbind(1):
        total = total + column
    return total / values.shape[1]


def _mean_around(values: Tensor) -> Tensor:
    """Return the mean over each block and up to 4 neighbours on either side."""
    padded = functional.pad(torch.stack((values, torch.ones_like(values))), (NEIGHBOURS, NEIGHBOURS))
    total = torch.zeros(2, len(values), dtype=torch.float64, device=values.device)
    for offset in range(2 * NEIGHBOURS + 1):
        total = total + padded[:, offset : offset + len(values)]
    return total[0] / total[1]
