"""Packings: codecs of 32 to 1 bit per value whose bytes decode alone.

fp32, bf16: every value as a number of its own, little-endian.
int8:  signed codes against the largest magnitude of blocks of 256; 8.0625 bit.
nf4:   16 levels of the normal distribution (QLoRA, arXiv 2305.14314), scale = largest magnitude; 4.125 bit.
e3m0:  sign and 3-bit exponent against one f32 scale for the whole tensor, as in Streaming DiLoCo (arXiv 2501.18512); 4 bit.
q2:    4 levels, Lloyd's for the normal distribution, scale = root mean square; 2.125 bit. Use with error feedback.
sign1: the sign, scale = mean magnitude; 1.125 bit. Use with error feedback.

nf4, q2 and sign1 have one bf16 scale per block of 128. Layout: all scales (little-endian), then all codes; the last block may be short and
is coded as if followed by zeros. Codes of 4 bits and fewer share bytes, the first code in the lowest bits. Decoding multiplies once per
value, so it gives the same bits on every device. Below 8 bits, packings are for pseudo-gradients, not for the larger weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from gossamer.optim.codecs.interface import MAX_MAGNITUDE, Packing, aligned, require_bounded

LARGEST_CODE = 127
UNIT = float(torch.tensor(1.0 / LARGEST_CODE, dtype=torch.float32, device="cpu"))
LEVELS_BLOCK_VALUES = 128
NF4_LEVELS = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
LLOYD_LEVELS = (-1.5104, -0.4528, 0.4528, 1.5104)
E3M0_BIAS = 7


class Dense(Packing):
    """Values cast to `dtype`; fp32 shares memory where it can."""

    def __init__(self, name: str, wire_id: int, dtype: torch.dtype) -> None:
        self.name = name
        self.wire_id = wire_id
        self._dtype = dtype

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return num_values * self._dtype.itemsize

    def _pack(self, values: Tensor) -> Tensor:
        return values.contiguous().to(self._dtype).view(torch.uint8)

    def _unpack(self, payload: Tensor, num_values: int) -> Tensor:
        values = aligned(payload, self._dtype.itemsize).view(self._dtype).float()
        require_bounded(values, f"{self.name} payload")
        return values


class Int8(Packing):
    """Signed 8-bit codes, to nearest, against the largest magnitude of each block: within scale * (1/254 + 2^-8)."""

    name = "int8"
    wire_id = 2

    def __init__(self, block_values: int) -> None:
        self._block_values = block_values

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return 2 * num_blocks(num_values, self._block_values) + num_values

    def _pack(self, values: Tensor) -> Tensor:
        rows = blocks(values, self._block_values)
        scales = rows.abs().amax(1).bfloat16()
        steps = scales.float().mul_(UNIT)
        scaled = rows / torch.where(steps > 0, steps, 1.0)[:, None]
        codes = scaled.round_().clamp_(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
        return torch.cat((scales.view(torch.uint8), codes.view(-1)[: values.numel()].view(torch.uint8)))

    def _unpack(self, payload: Tensor, num_values: int) -> Tensor:
        num_scales = num_blocks(num_values, self._block_values)
        steps = read_scales(payload, num_scales, self.name).mul_(UNIT)
        codes = payload[2 * num_scales :].view(torch.int8)
        if bool((codes < -LARGEST_CODE).any()):
            raise ValueError("The int8 payload holds the code -128, which is never sent.")
        rows = blocks(codes.float(), self._block_values).mul_(steps[:, None])
        return rows.view(-1)[:num_values]


class Levels(Packing):
    """Each code names the nearest of 2^bits levels, relative to the block's scale (0 for zeros only); a tie takes the lower level."""

    def __init__(self, name: str, wire_id: int, levels: tuple[float, ...]) -> None:
        self.name = name
        self.wire_id = wire_id
        self._bits = len(levels).bit_length() - 1
        self._levels = torch.tensor(levels, dtype=torch.float32, device="cpu")
        self._edges = (self._levels[1:] + self._levels[:-1]) / 2
        self._measure = {4: largest, 2: root_mean_square, 1: mean_magnitude}[self._bits]

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return 2 * num_blocks(num_values, LEVELS_BLOCK_VALUES) + code_bytes(num_values, self._bits)

    def _pack(self, values: Tensor) -> Tensor:
        rows = blocks(values, LEVELS_BLOCK_VALUES)
        scales = self._measure(rows, values.numel()).bfloat16()
        divisors = torch.where(scales > 0, scales.float(), 1.0)
        codes = torch.bucketize(rows / divisors[:, None], self._edges.to(rows.device), out_int32=True)
        packed = pack_codes(codes.view(-1)[: values.numel()].to(torch.uint8), self._bits)
        return torch.cat((scales.view(torch.uint8), packed))

    def _unpack(self, payload: Tensor, num_values: int) -> Tensor:
        num_scales = num_blocks(num_values, LEVELS_BLOCK_VALUES)
        scales = read_scales(payload, num_scales, self.name)
        codes = unpack_codes(payload[2 * num_scales :], self._bits, num_values).to(torch.int32)
        rows = blocks(self._levels.to(payload.device)[codes], LEVELS_BLOCK_VALUES).mul_(scales[:, None])
        return rows.view(-1)[:num_values]


class E3M0(Packing):
    """Sign and exponent: 0 or plus or minus scale * 2^(e - 7), e in 1..7; zero stays zero."""

    name = "e3m0"
    wire_id = 4

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return 4 + code_bytes(num_values, 4)

    def _pack(self, values: Tensor) -> Tensor:
        scale = values.abs().amax().view(1) if values.numel() else values.new_zeros(1)
        ratio = values.abs() / torch.where(scale > 0, scale, 1.0)
        # Halfway between 2^(e-7) and its double is 1.5 * 2^(e-7); frexp finds the power without a logarithm's rounding.
        exponent = torch.frexp(ratio / 1.5).exponent + E3M0_BIAS
        codes = exponent.clamp_(1, E3M0_BIAS) * (ratio > 2.0 ** (-E3M0_BIAS))
        return torch.cat((scale.view(torch.uint8), pack_codes((codes + 8 * (values < 0)).to(torch.uint8), 4)))

    def _unpack(self, payload: Tensor, num_values: int) -> Tensor:
        scale = aligned(payload[:4], 4).view(torch.float32)
        if not 0.0 <= float(scale) <= MAX_MAGNITUDE:
            raise ValueError("The e3m0 payload holds a scale that is negative, not finite, or far too large.")
        steps = [0.0] + [math.ldexp(1.0, exponent - E3M0_BIAS) for exponent in range(1, 8)]
        levels = torch.tensor(steps + [-step for step in steps], dtype=torch.float32, device=payload.device)
        return levels[unpack_codes(payload[4:], 4, num_values).to(torch.int32)].mul_(scale)


def num_blocks(num_values: int, block_values: int) -> int:
    """Return the number of blocks that hold `num_values`; the last one may be short."""
    return -(-num_values // block_values)


def blocks(values: Tensor, block_values: int) -> Tensor:
    """Return flat values as rows of `block_values`: a view, or a zero-padded copy when the last block is short."""
    missing = -values.numel() % block_values
    padded = functional.pad(values, (0, missing)) if missing else values
    return padded.view(-1, block_values)


def read_scales(payload: Tensor, num_scales: int, name: str) -> Tensor:
    """Return the f32[num_scales] at the payload's start. Raises ValueError unless all are in [0, MAX_MAGNITUDE]."""
    scales = aligned(payload[: 2 * num_scales], 2).view(torch.bfloat16).float()
    if not bool(((scales >= 0) & (scales <= MAX_MAGNITUDE)).all()):
        raise ValueError(f"The {name} payload holds a scale that is negative, not finite, or far too large.")
    return scales


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


def _counts(rows: Tensor, num_values: int) -> Tensor:
    counts = torch.full((len(rows),), float(rows.shape[1]), device=rows.device)
    counts[-1:] -= rows.numel() - num_values
    return counts


def code_bytes(num_codes: int, bits: int) -> int:
    """Return the number of bytes that hold `num_codes` codes of 1, 2 or 4 bits."""
    return -(-num_codes * bits // 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return uint8[code_bytes] for flat uint8 codes in [0, 2^bits), bits 1, 2 or 4; unused bits of the last byte are zero."""
    per_byte = 8 // bits
    columns = functional.pad(codes, (0, -codes.numel() % per_byte)).view(-1, per_byte)
    packed = columns[:, 0].clone()
    for place in range(1, per_byte):
        packed.bitwise_or_(columns[:, place] << (place * bits))
    return packed


def unpack_codes(packed: Tensor, bits: int, num_codes: int) -> Tensor:
    """Return the first `num_codes` uint8 codes that `pack_codes` wrote. Raises ValueError for bits set after the last code."""
    used = num_codes * bits % 8
    if used and bool(packed[-1] >> used):
        raise ValueError("The payload has bits set after its last code.")
    per_byte = 8 // bits
    columns = torch.empty((packed.numel(), per_byte), dtype=torch.uint8, device=packed.device)
    for place in range(per_byte):
        columns[:, place] = (packed >> (place * bits)) & (2**bits - 1)
    return columns.view(-1)[:num_codes]


DENSE = (Dense("fp32", 0, torch.float32), Dense("bf16", 1, torch.bfloat16))
BLOCKWISE = (Int8(256), Levels("nf4", 3, NF4_LEVELS), E3M0(), Levels("q2", 5, LLOYD_LEVELS), Levels("sign1", 6, (-1.0, 1.0)))
