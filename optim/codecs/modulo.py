"""Modulo codec: partners are close, so each sends its message modulo a window as wide as their gap, in a few bits per value.

Each block of 1024 values is rotated (optim/codecs/hadamard), which makes its gap Gaussian whatever the weights look like. A sketch of 8
rotated values in fp16 crosses first; from both sketches both sides compute the same gap scale sigma (optim/codecs/sketches). Then each
sends the integers round(r / step + dither) modulo 2^b, with step = 2 * kappa * sigma / 2^b, and 16 check bits per block. The receiver
takes the integer nearest to its own. Blocks whose difference did not fit the window are corrected or reported (optim/codecs/checks).
After Moniqua (arXiv 2002.11787); sketch, rotation and checks are additions (docs/concepts/mathematics.md).

Bits per value: b + (8 * 16 + 16) / 1024. Payload: all codes (optim/codecs/planes), then all checks (16 bit), little-endian; the last
block is padded with zeros. The gap is the same bit for bit, but for its sign, on both sides and on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optim.codecs import checks, planes, sketches
from gossamer.optim.codecs.hadamard import (
    BLOCK_VALUES,
    SIDE,
    dither_pool,
    leading_columns,
    need_exact_products,
    sign_pool,
    transform,
    window,
)
from gossamer.optim.codecs.interface import Codec, Encoded, Gap, aligned, require_bounded, require_payload, require_vector
from gossamer.optim.codecs.packings import blocks, num_blocks
from gossamer.optim.compiled import compiled_for

ROUNDING = 12582912.0  # 1.5 * 2^23: adding it to |x| < 2^22 in f32 rounds x and leaves the integer in the low bits
CPU_SLAB_BLOCKS = 128  # blocks per thread that pass all operations together: two buffers of 512 KiB stay in the cache of its core
SLAB_BLOCKS = 16384  # elsewhere: few launches, 128 MiB of scratch


@dataclass(frozen=True, slots=True)
class ModuloEncoded(Encoded):
    """A coded message and what `gap` needs later: sums (int32) and steps (f32) per block, and the signs of the rotation."""

    sums: Tensor
    steps: Tensor
    signs: Tensor


class Modulo(Codec):
    """`bits` per value, in a window of plus and minus `kappa` gap scales."""

    block_values = BLOCK_VALUES

    def __init__(self, bits: int, wire_id: int, kappa: float) -> None:
        self.name = f"modulo{bits}"
        self.wire_id = wire_id
        self.bits = bits
        self.kappa = kappa
        self._row_bytes = BLOCK_VALUES * bits // 8

    def num_blocks(self, num_values: int) -> int:
        """Return the number of blocks of 1024 that can fail."""
        return num_blocks(num_values, BLOCK_VALUES)

    def sketch_bytes(self, num_values: int) -> int:
        """Return the sketch's exact size."""
        return sketches.BYTES * self.num_blocks(num_values)

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return self.num_blocks(num_values) * (self._row_bytes + 2)

    def sketch(self, message: Tensor, seed: int) -> Tensor:
        """Return the first 8 rotated values of each block, as bytes. A value that is not finite makes all 8 of its block not finite."""
        require_vector(message)
        count = self.num_blocks(message.numel())
        signs = sign_pool(seed, count, message.device)
        values = torch.empty((count, sketches.VALUES), dtype=torch.float32, device=message.device)
        need_exact_products()
        if compiled := compiled_for(message.device):
            compiled.sketch(message, signs, values)
        else:
            for part, rows in _slabs(message):
                values[part] = leading_columns(rows * window(signs, part), sketches.VALUES).div_(SIDE)
        require_bounded(values, "message")
        return sketches.to_bytes(values)

    def encode(self, message: Tensor, seed: int, own_sketch: Tensor, partner_sketch: Tensor) -> ModuloEncoded:
        """Return codes and checks, and what `gap` needs; `own_sketch` must be the sketch of this message; see Codec."""
        require_vector(message)
        count, device = self.num_blocks(message.numel()), message.device
        steps = sketches.quantization_steps(own_sketch, partner_sketch, count, 2.0 * self.kappa / 2**self.bits).to(device)
        payload = torch.empty(self.payload_bytes(message.numel()), dtype=torch.uint8, device=device)
        sums = torch.empty(count, dtype=torch.int32, device=device)
        encoded = ModuloEncoded(payload, message.numel(), sums, steps, sign_pool(seed, count, device))
        dither = dither_pool(seed, count, device)
        need_exact_products()
        if compiled := compiled_for(device):
            compiled.encode(message, self.bits, encoded.signs, dither, steps, checks.weights(device), payload, sums)
            return encoded
        scratch = _scratch(count, device)
        for part, rows in _slabs(message):
            self._encode_slab(encoded, part, rows, dither, scratch[:, : len(rows)])
        payload[count * self._row_bytes :].view(torch.int16).copy_(checks.sent_bits(sums, self.bits))
        return encoded

    def gap(self, own: Encoded, partner_payload: Tensor, room: int = 0) -> Gap:
        """Return partner minus own, and the blocks that failed (the same on both sides); see Codec."""
        if not isinstance(own, ModuloEncoded):
            raise TypeError("The gap of a modulo codec needs what its own encode returned.")
        require_payload(partner_payload, self.payload_bytes(own.num_values), self.name)
        payload = aligned(partner_payload.to(own.payload.device), 4)
        need_exact_products()
        return _Decoding(self, own, payload, room).gap()

    def codes(self, payload: Tensor) -> Tensor:
        """Return a payload's packed codes, uint8[blocks, bytes]: a view."""
        count = payload.numel() // (self._row_bytes + 2)
        return payload[: count * self._row_bytes].view(count, self._row_bytes)

    def checks(self, payload: Tensor) -> Tensor:
        """Return a payload's checks, int16[blocks]: a view."""
        return payload[payload.numel() // (self._row_bytes + 2) * self._row_bytes :].view(torch.int16)

    def _encode_slab(self, encoded: ModuloEncoded, part: slice, rows: Tensor, dither: Tensor, scratch: Tensor) -> None:
        one, two = scratch
        transform(torch.mul(rows, window(encoded.signs, part), out=one), two)
        # Not addcmul: it rounds once on some machines and twice on others; the compiled part always rounds twice.
        torch.mul(one, (1.0 / (SIDE * encoded.steps[part]))[:, None], out=two).add_(window(dither, part))
        integers = two.add_(ROUNDING).view(torch.int32)
        checks.sums(integers, one.view(torch.int32), encoded.sums[part])
        codes = integers.bitwise_and_(2**self.bits - 1).to(torch.uint8)
        planes.pack(codes, self.bits, self.codes(encoded.payload)[part])


class _Decoding:
    """Decodes a partner's payload against the own message, slab by slab."""

    def __init__(self, coder: Modulo, own: ModuloEncoded, payload: Tensor, room: int) -> None:
        self._bits = coder.bits
        self._own = own
        self._payloads = payload, own.payload
        self._own_codes, self._partner_codes = coder.codes(own.payload), coder.codes(payload)
        self._partner_checks = coder.checks(payload).to(torch.int32)
        count, device = len(own.sums), payload.device
        padded = count * BLOCK_VALUES
        whole = torch.empty(max(padded, own.num_values + room), dtype=torch.float32, device=device)
        self._values = whole[:padded].view(count, BLOCK_VALUES)
        self._returned = whole[: own.num_values + room]
        self._shifts = torch.empty(count, dtype=torch.int32, device=device)
        self._tied = torch.empty(count, dtype=torch.bool, device=device)
        self._scratch = _scratch(count, device)

    def gap(self) -> Gap:
        """Decode all blocks, then correct those whose checks differ."""
        own, device = self._own, self._values.device
        if compiled := compiled_for(device):
            out = self._values, self._shifts, self._tied
            compiled.decode(self._payloads, self._bits, own.signs, own.steps, checks.weights(device), own.sums, out)
        else:
            for part in _parts(len(self._values), device):
                self._decode(part)
        failed = torch.zeros_like(self._tied)
        suspects = (self._tied | (self._shifts != 0)).nonzero().view(-1)
        for part in _parts(len(suspects), suspects.device):
            failed[suspects[part]] = ~self._correct(suspects[part])
        return Gap(self._returned, failed)

    def _decode(self, part: slice) -> None:
        one, two = self._scratch[:, : part.stop - part.start]
        self._tied[part] = planes.difference(self._partner_codes[part], self._own_codes[part], self._bits, one)
        self._shifts[part] = checks.sum_differences(one, self._own.sums[part], self._partner_checks[part], self._bits)
        transform(one, two).mul_((self._own.steps[part] / SIDE)[:, None])
        torch.mul(one, window(self._own.signs, part), out=self._values[part])

    def _correct(self, suspects: Tensor) -> Tensor:
        """Write some blocks again, corrected or zero; return which are correct."""
        one, two = self._scratch[:, : len(suspects)]
        planes.difference(self._partner_codes[suspects], self._own_codes[suspects], self._bits, one)
        good = checks.correct_wrapped(one, self._shifts[suspects], self._bits)
        transform(one, two).mul_((self._own.steps[suspects] / SIDE)[:, None])
        signs = window(self._own.signs, slice(0, len(self._values)))[suspects]
        self._values[suspects] = torch.where(good[:, None], one.mul_(signs), 0.0)
        return good


def _slab_blocks(device: torch.device) -> int:
    return CPU_SLAB_BLOCKS * torch.get_num_threads() if device.type == "cpu" else SLAB_BLOCKS


def _parts(count: int, device: torch.device) -> Iterator[slice]:
    for first in range(0, count, _slab_blocks(device)):
        yield slice(first, min(count, first + _slab_blocks(device)))


def _slabs(message: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield each slab and its f32[blocks, 1024]; only the last one may be a padded copy."""
    for part in _parts(num_blocks(message.numel(), BLOCK_VALUES), message.device):
        yield part, blocks(message[part.start * BLOCK_VALUES : part.stop * BLOCK_VALUES], BLOCK_VALUES)


def _scratch(count: int, device: torch.device) -> Tensor:
    return torch.empty((2, min(count, _slab_blocks(device)), BLOCK_VALUES), dtype=torch.float32, device=device)
