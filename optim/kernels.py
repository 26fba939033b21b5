"""Coding on CUDA devices in Triton, in one pass over memory: what compiled.c does on the CPU.

Imported by optim/compiled.py alone, where triton is installed. Decoding has the same bits as every other form: whole numbers below 2^24
are added exactly in any order, and one product rounds (docs/decisions/2026-11-27-triton-coding.md). `enable_fp_fusion=False` keeps a
product and a sum from becoming one operation, which would round once where the other forms round twice. Denormal numbers are computed as
they are, which is Triton's default for sums and products.

A block of 1024 values lies in the registers of one warp, 32 in each thread, as a cube of 2 x 2 x ... x 2. A butterfly along an axis needs
no shared memory, only registers and shuffles of the warp.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# Chosen by speed, as is one warp; no value changes a bit.
BLOCKS_PER_PROGRAM: Final = {"sketch": 1, "encode": 1, "decode": 4}  # consecutive: the next window of a pool lies in the L1 cache

BLOCK_VALUES = tl.constexpr(1024)
STRIDE = tl.constexpr(16)  # as in optim/codecs/hadamard.py
PER_SIDE = tl.constexpr(1.0 / 32.0)  # a power of two: a product with it rounds as the division does
ROUNDING = tl.constexpr(12582912.0)  # as in optim/codecs/modulo.py


class TritonKernels:
    """The functions of `Compiled` on contiguous CUDA tensors whose sizes the caller has checked. Threads may share it.

    Raises RuntimeError, or an error of Triton's, where it cannot compile a kernel: nothing else is tried instead.
    """

    name: Final = "triton"

    def sketch(self, message: Tensor, signs: Tensor, out: Tensor) -> None:
        """Write the first 8 values of each rotated block, divided by 32, into f32[blocks, 8]."""
        _need_contiguous(signs, out)
        _launch("sketch", _sketch, len(out), (message.contiguous(), signs, out, message.numel()), {})

    def encode(
        self, message: Tensor, bits: int, signs: Tensor, dither: Tensor, steps: Tensor, weights: Tensor, payload: Tensor, sums: Tensor
    ) -> None:
        """Write a modulo payload (codes and checks), and the weighted sum of each block's integers into int32[blocks]."""
        _need_contiguous(signs, dither, steps, weights, payload, sums)
        inverses = 1.0 / (32.0 * steps)  # in torch: Triton's own division need not round to the nearest
        written = payload, _checks(payload, bits, len(sums)), sums
        _launch(
            "encode",
            _encode,
            len(sums),
            (message.contiguous(), signs, dither, inverses, weights, *written, message.numel()),
            {"bits": bits},
        )

    def decode(
        self,
        payloads: tuple[Tensor, Tensor],
        bits: int,
        signs: Tensor,
        steps: Tensor,
        weights: Tensor,
        own_sums: Tensor,
        out: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write the partner's payload minus the own one into `out`: f32[blocks, 1024], shifts of the checks (int32) and ties (bool)."""
        partner, own = payloads[0].contiguous(), payloads[1]
        _need_contiguous(own, signs, steps, weights, own_sums, *out)
        values, shifts, tied = out[0], out[1], out[2].view(torch.uint8)
        arrays = partner, own, _checks(partner, bits, len(own_sums)), signs, steps, weights, own_sums, values, shifts, tied
        _launch("decode", _decode, len(own_sums), arrays, {"bits": bits})


def _launch(name: str, kernel: Any, count: int, arguments: tuple[Any, ...], constants: dict[str, int]) -> None:
    blocks = BLOCKS_PER_PROGRAM[name]
    try:
        with torch.cuda.device(arguments[0].get_device()):
            kernel[(triton.cdiv(count, blocks),)](*arguments, count, **constants, blocks=blocks, num_warps=1, enable_fp_fusion=False)
    except OSError as error:  # of Triton's cache or compiler; the exchange takes an OSError for trouble with a file of payloads
        raise RuntimeError(f"Triton cannot compile: {error}") from error


def _checks(payload: Tensor, bits: int, count: int) -> Tensor:
    """Return a payload's checks, int16[blocks]: a view."""
    return payload[count * (BLOCK_VALUES.value * bits // 8) :].view(torch.int16)


def _need_contiguous(*tensors: Tensor) -> None:
    """Raise TypeError for strides, which no kernel reads, and for tensors of several devices."""
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.device != tensors[0].device:
            raise TypeError(f"Contiguous tensors on {tensors[0].device} were expected, not strides {tensor.stride()} on {tensor.device}.")


@triton.jit(do_not_specialize=["count"])  # which would compile it again, for nothing
def _sketch(message: tl.tensor, signs: tl.tensor, out: tl.tensor, num_values: tl.tensor, count: tl.tensor, blocks: tl.constexpr) -> None:
    i = tl.arange(0, BLOCK_VALUES)
    first = tl.program_id(0).to(tl.int64) * blocks
    for j in range(blocks):
        k = first + j
        if k < count:
            x = _block(message, k, num_values) * tl.load(signs + k * STRIDE + i)
            cube = tl.reshape(tl.sum(tl.reshape(x, [128, 8]), 0), [2, 2, 2])  # the other bits of a value's number do not change these signs
            for axis in tl.static_range(3):
                cube = _butterfly(cube, axis, 3)
            tl.store(out + k * 8 + tl.arange(0, 8), tl.reshape(cube, [8]) * PER_SIDE)


@triton.jit(do_not_specialize=["count"])  # which would compile it again, for nothing
def _encode(
    message: tl.tensor,
    signs: tl.tensor,
    dither: tl.tensor,
    inverses: tl.tensor,
    weights: tl.tensor,
    codes: tl.tensor,
    checks: tl.tensor,
    sums: tl.tensor,
    num_values: tl.tensor,
    count: tl.tensor,
    bits: tl.constexpr,
    blocks: tl.constexpr,
) -> None:
    i = tl.arange(0, BLOCK_VALUES)
    odd = tl.load(weights + i)
    first = tl.program_id(0).to(tl.int64) * blocks
    for j in range(blocks):
        k = first + j
        if k < count:
            x = _transform(_block(message, k, num_values) * tl.load(signs + k * STRIDE + i))
            rounded = (tl.load(dither + k * STRIDE + i) + x * tl.load(inverses + k)) + ROUNDING
            numbers = rounded.to(tl.int32, bitcast=True)
            total = tl.sum(numbers * odd, 0, keep_dims=True)  # wraps, as everywhere; Triton's interpreter refuses that for a scalar
            at = k + tl.arange(0, 1)
            tl.store(sums + at, total)
            tl.store(checks + at, (total >> bits).to(tl.int16))
            _store_codes(codes + k * (BLOCK_VALUES * bits // 8), numbers, bits)


@triton.jit(do_not_specialize=["count"])  # which would compile it again, for nothing
def _decode(
    partner: tl.tensor,
    own: tl.tensor,
    checks: tl.tensor,
    signs: tl.tensor,
    steps: tl.tensor,
    weights: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    shifts: tl.tensor,
    tied: tl.tensor,
    count: tl.tensor,
    bits: tl.constexpr,
    blocks: tl.constexpr,
) -> None:
    half: tl.constexpr = 1 << (bits - 1)
    i = tl.arange(0, BLOCK_VALUES)
    odd = tl.load(weights + i)
    first = tl.program_id(0).to(tl.int64) * blocks
    for j in range(blocks):
        k = first + j
        if k < count:
            row = k * (BLOCK_VALUES * bits // 8)
            wrapped = (_load_codes(partner + row, bits) - _load_codes(own + row, bits) + half) & (2 * half - 1)
            tl.store(tied + k, (tl.min(wrapped, 0) == 0).to(tl.uint8))
            differences = wrapped - half
            at = k + tl.arange(0, 1)
            total = tl.load(sums + at) + tl.sum(differences * odd, 0, keep_dims=True)  # wraps, as everywhere
            tl.store(shifts + at, (tl.load(checks + at).to(tl.int32) - (total >> bits)) & 0xFFFF)
            x = _transform(differences.to(tl.float32)) * (tl.load(steps + k) * PER_SIDE)
            tl.store(values + k * BLOCK_VALUES + i, x * tl.load(signs + k * STRIDE + i))


@triton.jit
def _block(message: tl.tensor, k: tl.tensor, num_values: tl.tensor) -> tl.tensor:
    """Return block k of a message, padded with zeros."""
    i = k * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    return tl.load(message + i, mask=i < num_values, other=0.0)


@triton.jit
def _transform(x: tl.tensor) -> tl.tensor:
    """Multiply f32[1024] by H."""
    cube = tl.reshape(x, [2] * 10)
    for axis in tl.static_range(10):
        cube = _butterfly(cube, axis, 10)
    return tl.reshape(cube, [1024])


@triton.jit
def _butterfly(cube: tl.tensor, axis: tl.constexpr, rank: tl.constexpr) -> tl.tensor:
    """Replace each pair a, b along an axis by a + b, a - b."""
    number = cube.to(tl.int32, bitcast=True)
    other = (tl.sum(number, axis, keep_dims=True) - number).to(tl.float32, bitcast=True)  # exact: of whole numbers, which wrap
    sign = tl.reshape(1 - 2 * tl.arange(0, 2), [1] * axis + [2] + [1] * (rank - axis - 1)).to(tl.float32)
    return other + cube * sign


@triton.jit
def _store_codes(codes: tl.tensor, numbers: tl.tensor, bits: tl.constexpr) -> None:
    """Write the low bits of each number, in planes as optim/codecs/planes.py has them."""
    low: tl.constexpr = 4 if bits == 6 else 2 if bits == 3 else bits
    _store_plane(codes, numbers, low)
    if low != bits:
        _store_plane(codes + 128 * low, numbers >> low, bits - low)


@triton.jit
def _store_plane(codes: tl.tensor, numbers: tl.tensor, bits: tl.constexpr) -> None:
    groups: tl.constexpr = 8 // bits
    width: tl.constexpr = 128 * bits
    fields = tl.reshape(numbers & ((1 << bits) - 1), [groups, width])
    packed = tl.sum(fields << (bits * tl.arange(0, groups))[:, None], 0)
    tl.store(codes + tl.arange(0, width), packed.to(tl.uint8))


@triton.jit
def _load_codes(codes: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """Return the codes of a block, int32[1024]. Its bytes may lie at any address."""
    low: tl.constexpr = 4 if bits == 6 else 2 if bits == 3 else bits
    found = _load_plane(codes, low)
    if low != bits:
        found = found | (_load_plane(codes + 128 * low, bits - low) << low)
    return found


@triton.jit
def _load_plane(codes: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    width: tl.constexpr = 128 * bits
    i = tl.arange(0, BLOCK_VALUES)
    octets = tl.load(codes + i % width).to(tl.int32)
    return (octets >> (i // width * bits)) & ((1 << bits) - 1)
