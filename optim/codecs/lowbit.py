"""Packings of 4, 2 and 1 bit per value for pseudo-gradients, most with one bf16 scale per block of 128.

nf4:   16 levels of the normal distribution (QLoRA, arXiv 2305.14314), scale = largest magnitude; 4.125 bit.
q2:    4 levels, Lloyd's for the normal distribution, scale = root mean square; 2.125 bit. Use with error feedback.
sign1: the sign, scale = mean magnitude; 1.125 bit. Use with error feedback.
e3m0:  sign and 3-bit exponent against one f32 scale for the whole tensor, as in Streaming DiLoCo (arXiv 2501.18512); 4 bit.
Layout: all scales, then all codes, first code lowest (optim/codecs/bits). Decoding is one exact product per value. Not for weights: these
errors are relative to the values, and weights are much larger than the gaps between them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optim.codecs import bits
from optim.codecs.blockwise import blocks, num_blocks, read_scales
from optim.codecs.interface import MAX_MAGNITUDE, aligned, require_message, require_payload

BLOCK_VALUES = 128
NF4_LEVELS = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
LLOYD_LEVELS = (-1.5104, -0.4528, 0.4528, 1.5104)
E3M0_BIAS = 7


def largest(rows: Tensor, num_values: int) -> Tensor:
    """Return each row's largest magnitude."""
    return rows.abs().amax(1)


def root_mean_square(rows: Tensor, num_values: int) -> Tensor:
    """Return each row's root mean square over the values that are not padding."""
    # Scaled first: squares of tiny or huge values leave the range of f32.
    scale = rows.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny)
    squares = (rows / scale[:, None]).square_().sum(1)
    return (squares / _counts(rows, num_values)).sqrt_().mul_(scale)


def mean_magnitude(rows: Tensor, num_values: int) -> Tensor:
    """Return each row's mean magnitude over the values that are not padding."""
    return rows.abs().sum(1) / _counts(rows, num_values)


class Levels:
    """Codes that name the nearest of 2^bits levels, times the block's scale."""

    def __init__(self, name: str, wire_id: int, levels: tuple[float, ...]) -> None:
        self.name = name
        self.wire_id = wire_id
        self._bits = len(levels).bit_length() - 1
        self._levels = torch.tensor(levels, dtype=torch.float32)
        self._edges = (self._levels[1:] + self._levels[:-1]) / 2
        self._measure = {4: largest, 2: root_mean_square, 1: mean_magnitude}[self._bits]

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return 2 * num_blocks(num_values, BLOCK_VALUES) + bits.num_bytes(num_values, self._bits)

    def pack(self, values: Tensor) -> Tensor:
        """Return scales and codes; a value on an edge takes the lower level, a block of zeros scale zero."""
        require_message(values)
        rows = blocks(values, BLOCK_VALUES)
        scales = self._measure(rows, values.numel()).bfloat16() if values.numel() else values.bfloat16()
        divisors = torch.where(scales > 0, scales.float(), 1.0)
        codes = torch.bucketize(rows / divisors[:, None], self._edges.to(rows.device), out_int32=True)
        packed = bits.pack(codes.view(-1)[: values.numel()].to(torch.uint8), self._bits)
        return torch.cat((scales.view(torch.uint8), packed))

    def unpack(self, payload: Tensor, num_values: int) -> Tensor:
        """Return f32[num_values]."""
        require_payload(payload, self.payload_bytes(num_values), self.name)
        num_scales = num_blocks(num_values, BLOCK_VALUES)
        scales = read_scales(payload, num_scales, self.name)
        packed = payload[2 * num_scales :]
        bits.require_clean_end(packed, self._bits, num_values, self.name)
        codes = bits.unpack(packed, self._bits, num_values).to(torch.int32)
        rows = blocks(self._levels.to(payload.device)[codes], BLOCK_VALUES).mul_(scales[:, None])
        return rows.view(-1)[:num_values]


class E3M0:
    """Sign and exponent: 0 or plus or minus scale * 2^(e - 7), e in 1..7; zero stays zero."""

    name = "e3m0"
    wire_id = 4

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return 4 + bits.num_bytes(num_values, 4)

    def pack(self, values: Tensor) -> Tensor:
        """Return the f32 scale and the codes, rounded to the nearest level."""
        require_message(values)
        scale = values.abs().amax().view(1) if values.numel() else values.new_zeros(1)
        ratio = values.abs() / torch.where(scale > 0, scale, 1.0)
        # Halfway between 2^(e-7) and its double is 1.5 * 2^(e-7); frexp finds the power without a logarithm's rounding.
        exponent = torch.frexp(ratio / 1.5).exponent + E3M0_BIAS
        codes = exponent.clamp_(1, E3M0_BIAS) * (ratio > 2.0 ** (-E3M0_BIAS))
        return torch.cat((scale.view(torch.uint8), bits.pack((codes + 8 * (values < 0)).to(torch.uint8), 4)))

    def unpack(self, payload: Tensor, num_values: int) -> Tensor:
        """Return f32[num_values]."""
        require_payload(payload, self.payload_bytes(num_values), self.name)
        scale = aligned(payload[:4], 4).view(torch.float32)
        if not 0.0 <= float(scale) <= MAX_MAGNITUDE:
            raise ValueError("The e3m0 payload holds a scale that is negative, not finite, or far too large.")
        bits.require_clean_end(payload[4:], 4, num_values, self.name)
        steps = [0.0] + [math.ldexp(1.0, exponent - E3M0_BIAS) for exponent in range(1, 8)]
        levels = torch.tensor(steps + [-step for step in steps], dtype=torch.float32, device=payload.device)
        return levels[bits.unpack(payload[4:], 4, num_values).to(torch.int32)].mul_(scale)


def _counts(rows: Tensor, num_values: int) -> Tensor:
    """Return how many values of each row are not padding."""
    counts = torch.full((len(rows),), float(rows.shape[1]), device=rows.device)
    counts[-1] -= rows.numel() - num_values
    return counts


NF4 = Levels("nf4", 3, NF4_LEVELS)
Q2 = Levels("q2", 5, LLOYD_LEVELS)
SIGN1 = Levels("sign1", 6, (-1.0, 1.0))
