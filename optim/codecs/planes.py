"""Codes of 2, 3, 4, 6 or 8 bits packed into bytes, row by row, with no arithmetic across rows.

A code is cut into planes of 8, 4, 2 or 1 bits (6 = 4 + 2, 3 = 2 + 1). In a plane, byte c of a row holds column c in its lowest bits,
then column c + width, c + 2*width, .... Rows must be multiples of 32 codes and begin at multiples of 4 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLANES = {8: (8,), 6: (4, 2), 4: (4,), 3: (2, 1), 2: (2,)}
EVERY_BYTE = 0x01010101


def pack(codes: Tensor, bits: int, packed: Tensor) -> None:
    """Write uint8[rows, n] codes in [0, 2^bits) into uint8[rows, n * bits / 8]."""
    words, target = codes.view(torch.int32), packed.view(torch.int32)
    column = shift = 0
    for plane_bits in PLANES[bits]:
        plane = words if plane_bits == bits else (words >> shift) & _mask(plane_bits)
        folded = _fold(plane, plane_bits)
        target[:, column : column + folded.shape[1]] = folded
        column += folded.shape[1]
        shift += plane_bits


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the uint8[rows, n] codes that `pack` wrote."""
    num_columns = packed.shape[1] * 8 // bits
    codes = torch.zeros((len(packed), num_columns), dtype=torch.uint8, device=packed.device)
    words, target = packed.view(torch.int32), codes.view(torch.int32)
    column = shift = 0
    for plane_bits in PLANES[bits]:
        width = target.shape[1] * plane_bits // 8
        for group, field in enumerate(_fields(words[:, column : column + width], plane_bits)):
            target[:, group * width : (group + 1) * width].bitwise_or_(field << shift)
        column += width
        shift += plane_bits
    return codes


def difference(minuend: Tensor, subtrahend: Tensor, bits: int, out: Tensor) -> Tensor:
    """Write minuend - subtrahend of two packings modulo 2^b as f32[rows, n], in [-2^(b-1), 2^(b-1)).

    Returns bool[rows]: the rows that hold -2^(b-1), the only value whose negative lies outside that interval.
    """
    half = 1 << (bits - 1)
    if len(PLANES[bits]) > 1:
        wrapped = unpack(minuend, bits).sub_(unpack(subtrahend, bits)).add_(half).bitwise_and_(2 * half - 1)
        torch.sub(out.copy_(wrapped), half, out=out)
        return wrapped.amin(1) == 0
    tops = half * (0xFFFFFFFF // (2 * half - 1)) - 2**32  # the highest bit of every field, as int32
    minuends, subtrahends = minuend.view(torch.int32), subtrahend.view(torch.int32)
    # Field by field, without borrowing between fields, plus half a field's range.
    words = ((minuends | tops) - (subtrahends & ~tops)).bitwise_xor_((minuends ^ subtrahends) & tops)
    tied = torch.zeros(len(out), dtype=torch.bool, device=out.device)
    width = 4 * words.shape[1]
    for group, field in enumerate(_fields(words, bits)):
        wrapped = field.view(torch.uint8)
        out[:, group * width : (group + 1) * width].copy_(wrapped)
        tied |= wrapped.amin(1) == 0
    out.sub_(half)
    return tied


def _fields(words: Tensor, plane_bits: int) -> list[Tensor]:
    """Return the groups of a plane with one code per byte."""
    if plane_bits == 8:
        return [words]
    return [(words >> (group * plane_bits)) & _mask(plane_bits) for group in range(8 // plane_bits)]


def _fold(words: Tensor, plane_bits: int) -> Tensor:
    """Combine the halves of each row, one shifted, until every byte is full."""
    shift = 8
    while shift > plane_bits:
        shift //= 2
        half = words.shape[1] // 2
        words = words[:, :half] | (words[:, half:] << shift)
    return words


def _mask(plane_bits: int) -> int:
    return EVERY_BYTE * ((1 << plane_bits) - 1)
