"""Side-information codec: partners are close, so a message is sent modulo a window as wide as their gap, in a few bits per value.

Each block of 1024 values is rotated (optim/codecs/hadamard), which makes its gap Gaussian whatever the weights look like. A sketch of 8
rotated values in fp16 crosses first; from both sketches both sides compute the same gap scale sigma. Then each sends the integers
round(r / step + dither) modulo 2^b, with step = 2 * kappa * sigma / 2^b, and 16 check bits per block; the receiver takes the
difference nearest to its own integer. Blocks whose difference did not fit the window are mended or reported (optim/codecs/checks).
After Moniqua (arXiv 2002.11787); sketch, rotation and checks are ours (design section 4). Only for messages of partners: the payload
alone means nothing.

Bits per value: b + (8 * 16 + 16) / 1024. Layout: sketch: fp16, 8 per block. Payload: all codes (optim/codecs/planes), then
all checks (16 bit), little-endian; the last block is padded with zeros. The gap comes out bit for bit the same, but for its sign, on
both sides and on every device: scales are computed on the CPU in float64, element by element, and the rest is exact on integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from optim.codecs import checks, planes
from optim.codecs.blockwise import blocks, num_blocks
from optim.codecs.hadamard import BLOCK_VALUES, SIDE, dither_pool, exact_products, leading, sign_pool, transform, window
from optim.codecs.interface import Encoded, Gap, aligned, require_bounded, require_payload, require_vector

SKETCH_VALUES = 8
NEIGHBOURS = 4
FP16_LARGEST = 65504.0
ROUNDING = 12582912.0  # 1.5 * 2^23: adding it to |x| < 2^22 in f32 rounds x and leaves the integer in the low bits
CPU_SLAB_BLOCKS = 256  # blocks that go through the chain of operations together: 1 MiB of f32 stays in the caches
SLAB_BLOCKS = 16384  # elsewhere: few launches, 128 MiB of scratch


@dataclass(frozen=True, slots=True)
class ModuloEncoded(Encoded):
    """A coded message and what its gap needs again: sums (int32) and steps (f32) per block, and the signs of the rotation."""

    sums: Tensor
    steps: Tensor
    signs: Tensor


class Modulo:
    """`bits` per value, in a window of plus and minus `kappa` gap scales."""

    block_values = BLOCK_VALUES

    def __init__(self, bits: int, wire_id: int, kappa: float) -> None:
        self.name = f"modulo{bits}"
        self.wire_id = wire_id
        self.bits = bits
        self.kappa = kappa

    def num_blocks(self, num_values: int) -> int:
        """Return how many blocks of 1024 can fail."""
        return num_blocks(num_values, BLOCK_VALUES)

    def sketch_bytes(self, num_values: int) -> int:
        """Return the sketch's exact size."""
        return 2 * SKETCH_VALUES * self.num_blocks(num_values)

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return self.num_blocks(num_values) * (2 + BLOCK_VALUES * self.bits // 8)

    def sketch(self, message: Tensor, seed: int) -> Tensor:
        """Return the first 8 rotated values of each block, fp16, as bytes. A value that is not finite spoils all 8 of its block."""
        require_vector(message)
        signs = sign_pool(seed, self.num_blocks(message.numel()), message.device)
        values = torch.empty((self.num_blocks(message.numel()), SKETCH_VALUES), dtype=torch.float32, device=message.device)
        with exact_products():
            for first, rows in _slabs(message):
                values[first : first + len(rows)] = leading(rows * window(signs, first, len(rows)), SKETCH_VALUES).div_(SIDE)
        require_bounded(values)
        return values.clamp_(-FP16_LARGEST, FP16_LARGEST).half().view(-1).view(torch.uint8)

    def encode(self, message: Tensor, seed: int, own_sketch: Tensor, partner_sketch: Tensor) -> ModuloEncoded:
        """Return codes and checks, and what `gap` needs; `own_sketch` must be this message's.

        Raises ValueError for a sketch that is not finite or has another size.
        """
        require_vector(message)
        count, device = self.num_blocks(message.numel()), message.device
        steps = gap_steps(own_sketch, partner_sketch, count, 2.0 * self.kappa / 2**self.bits).to(device)
        signs, dither = sign_pool(seed, count, device), dither_pool(seed, count, device)
        payload = torch.empty(self.payload_bytes(message.numel()), dtype=torch.uint8, device=device)
        codes = self._codes(payload, count)
        row_sums = torch.empty(count, dtype=torch.int32, device=device)
        scratch = _scratch(count, device)
        with exact_products():
            for first, rows in _slabs(message):
                last = first + len(rows)
                one, two = scratch[0, : len(rows)], scratch[1, : len(rows)]
                transform(torch.mul(rows, window(signs, first, len(rows)), out=one), two)
                scaled = torch.addcmul(window(dither, first, len(rows)), one, (1.0 / (SIDE * steps[first:last]))[:, None], out=two)
                integers = scaled.add_(ROUNDING).view(torch.int32)
                checks.sums(integers, one.view(torch.int32), row_sums[first:last])
                planes.pack(integers.bitwise_and_(2**self.bits - 1).to(torch.uint8), self.bits, codes[first:last])
        payload[codes.numel() :].view(torch.int16).copy_(checks.transmitted(row_sums, self.bits))
        return ModuloEncoded(payload, message.numel(), row_sums, steps, signs)

    def gap(self, own: Encoded, partner_payload: Tensor) -> Gap:
        """Return partner minus own, and which blocks stayed unreadable (the same ones on both sides); their values are zero."""
        if not isinstance(own, ModuloEncoded):
            raise TypeError("The gap of a modulo codec needs what its own encode returned.")
        require_payload(partner_payload, self.payload_bytes(own.num_values), self.name)
        payload, count = aligned(partner_payload.to(own.payload.device), 4), self.num_blocks(own.num_values)
        own_codes, partner_codes = self._codes(own.payload, count), self._codes(payload, count)
        partner_checks = payload[own_codes.numel() :].view(torch.int16).to(torch.int32)
        values = torch.empty((count, BLOCK_VALUES), dtype=torch.float32, device=payload.device)
        shifts = torch.empty(count, dtype=torch.int32, device=payload.device)
        tied = torch.empty(count, dtype=torch.bool, device=payload.device)
        scratch = _scratch(count, payload.device)
        with exact_products():
            for first in range(0, count, _slab_blocks(payload.device)):
                rows = slice(first, min(count, first + _slab_blocks(payload.device)))
                one, two = scratch[0, : rows.stop - first], scratch[1, : rows.stop - first]
                tied[rows] = planes.difference(partner_codes[rows], own_codes[rows], self.bits, one)
                shifts[rows] = checks.shifts(one, own.sums[rows], partner_checks[rows], self.bits)
                transform(one, two).mul_((own.steps[rows] / SIDE)[:, None])
                torch.mul(one, window(own.signs, first, len(one)), out=values[rows])
            suspects = (tied | (shifts != 0)).nonzero().view(-1)
            good = self._mend(suspects, own, own_codes, partner_codes, shifts, values)
        failed = torch.zeros(count, dtype=torch.bool, device=payload.device)
        failed[suspects] = ~good
        return Gap(values.view(-1)[: own.num_values], failed)

    def _mend(
        self, suspects: Tensor, own: ModuloEncoded, own_codes: Tensor, partner_codes: Tensor, shifts: Tensor, values: Tensor
    ) -> Tensor:
        """Decode the suspect blocks again, mended, or set them to zero; return which are good."""
        differences = torch.empty((len(suspects), BLOCK_VALUES), dtype=torch.float32, device=values.device)
        planes.difference(partner_codes[suspects], own_codes[suspects], self.bits, differences)
        good = checks.mend(differences, shifts[suspects], self.bits)
        transform(differences, torch.empty_like(differences)).mul_((own.steps[suspects] / SIDE)[:, None])
        signs = window(own.signs, 0, len(values))[suspects]
        values[suspects] = torch.where(good[:, None], differences.mul_(signs), 0.0)
        return good

    def _codes(self, payload: Tensor, count: int) -> Tensor:
        row_bytes = BLOCK_VALUES * self.bits // 8
        return payload[: count * row_bytes].view(count, row_bytes)


def gap_steps(own_sketch: Tensor, partner_sketch: Tensor, count: int, steps_per_sigma: float) -> Tensor:
    """Return each block's step, f32[count] on the CPU, bit for bit the same on both sides.

    sigma^2 is a quarter of the block's own mean square difference and three quarters of that of the blocks around it: one block's 8
    values alone miss by 25 %, and neighbours are alike. It never falls below what fp16 sketches can show.
    """
    own, partner = (_read_sketch(sketch, count) for sketch in (own_sketch, partner_sketch))
    square = _row_mean((own - partner) * (own - partner))
    floor = _row_mean(own * own + partner * partner) * 2.0**-24 + 2.0**-48
    variance = torch.maximum(0.25 * square + 0.75 * _around(square), _around(floor))
    return (torch.sqrt(variance) * steps_per_sigma).float()


def _read_sketch(sketch: Tensor, count: int) -> Tensor:
    """Return f64[count, 8] on the CPU."""
    require_payload(sketch, 2 * SKETCH_VALUES * count, "sketch")
    values = aligned(sketch.cpu(), 2).view(torch.float16).view(count, SKETCH_VALUES).double()
    if not bool(torch.isfinite(values).all()):
        raise ValueError("The sketch holds values that are not finite.")
    return values


def _row_mean(values: Tensor) -> Tensor:
    """Return the mean of each row, added up in a fixed order (a reduction's order differs between machines)."""
    total = torch.zeros(len(values), dtype=torch.float64)
    for column in values.unbind(1):
        total = total + column
    return total / values.shape[1]


def _around(values: Tensor) -> Tensor:
    """Return the mean over each block and up to 4 neighbours on either side, added up in a fixed order."""
    reach = NEIGHBOURS
    padded = functional.pad(torch.stack((values, torch.ones_like(values))), (reach, reach))
    total = torch.zeros(2, len(values), dtype=torch.float64)
    for offset in range(2 * reach + 1):
        total = total + padded[:, offset : offset + len(values)]
    return total[0] / total[1]


def _slab_blocks(device: torch.device) -> int:
    return CPU_SLAB_BLOCKS if device.type == "cpu" else SLAB_BLOCKS


def _slabs(message: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first block, f32[blocks, 1024]) over the message; only the last rows are a copy, when padding is needed."""
    step = _slab_blocks(message.device) * BLOCK_VALUES
    for start in range(0, message.numel(), step):
        yield start // BLOCK_VALUES, blocks(message[start : start + step], BLOCK_VALUES)


def _scratch(count: int, device: torch.device) -> Tensor:
    """Return two buffers for the longest slab."""
    return torch.empty((2, min(count, _slab_blocks(device)), BLOCK_VALUES), dtype=torch.float32, device=device)
