"""Codes of 3, 4, 6 or 8 bits packed into bytes, row by row, with no arithmetic across rows.

A code is cut into planes of 8, 4, 2 or 1 bits (6 = 4 + 2, 3 = 2 + 1). In a plane, byte c of a row holds column c in its lowest bits,
then column c + width, c + 2*width, ...: neighbours in a row never share a byte, so packing is a few operations on contiguous halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLANES = {8: (8,), 6: (4, 2), 4: (4,), 3: (2, 1)}
EVERY_BYTE = 0x01010101


def pack(codes: Tensor, bits: int, packed: Tensor) -> None:
    """Write int32[rows, n] codes in [0, 2^bits) into uint8[rows, n * bits / 8]; n must divide by 8. `codes` is left alone."""
    column = 0
    shift = 0
    for plane_bits in PLANES[bits]:
        plane = codes if plane_bits == bits else (codes >> shift) & (2**plane_bits - 1)
        folded = _fold(plane, plane_bits)
        packed[:, column : column + folded.shape[1]].copy_(folded)
        column += folded.shape[1]
        shift += plane_bits


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the uint8[rows, n] codes that `pack` wrote; n must divide by 32 and `packed` start at a multiple of 4 bytes."""
    num_columns = packed.shape[1] * 8 // bits
    codes = torch.empty((len(packed), num_columns), dtype=torch.uint8, device=packed.device)
    column = 0
    shift = 0
    for plane_bits in PLANES[bits]:
        width = num_columns * plane_bits // 8
        _unfold(packed[:, column : column + width], plane_bits, shift, codes)
        column += width
        shift += plane_bits
    return codes


def _fold(plane: Tensor, plane_bits: int) -> Tensor:
    """Add halves onto each other, shifted, until a byte is full."""
    shift = 8
    while shift > plane_bits:
        shift //= 2
        half = plane.shape[1] // 2
        plane = torch.add(plane[:, :half], plane[:, half:], alpha=2**shift)
    return plane


def _unfold(packed: Tensor, plane_bits: int, shift: int, codes: Tensor) -> None:
    """Put one plane's bits in their place of every code, four bytes at a time."""
    words, width = packed.view(torch.int32), packed.shape[1]
    mask = EVERY_BYTE * (2**plane_bits - 1)
    for group in range(8 // plane_bits):
        part = codes[:, group * width : (group + 1) * width].view(torch.int32)
        field = (words >> (group * plane_bits)) & mask if plane_bits < 8 else words
        if shift:
            part.bitwise_or_(field << shift)
        else:
            part.copy_(field)
