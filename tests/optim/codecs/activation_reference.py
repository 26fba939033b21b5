"""The float64 oracle of the activation codecs: one block at a time, in plain Python, with nothing of `optim` but the shared signs.

A decoded block is `scale * code / largest`, with the scale in bf16; int4 rotates the block before and back after it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

BLOCK = 64


def bf16(value: float) -> float:
    """The nearest number with 8 bits of mantissa, ties to even, of one that f32 holds."""
    [bits] = struct.unpack("<I", struct.pack("<f", value))
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    [nearest] = struct.unpack("<f", struct.pack("<I", kept))
    return float(nearest)


def rotated(block: Sequence[float], signs: Sequence[float]) -> list[float]:
    """The block times diag(signs) times the Sylvester-Hadamard matrix, of the same length."""
    return [
        math.fsum(signs[row] * value * (-1.0) ** (row & column).bit_count() for row, value in enumerate(block)) / math.sqrt(BLOCK)
        for column in range(BLOCK)
    ]


def rotated_back(block: Sequence[float], signs: Sequence[float]) -> list[float]:
    return [
        signs[row] * math.fsum(value * (-1.0) ** (row & column).bit_count() for column, value in enumerate(block)) / math.sqrt(BLOCK)
        for row in range(BLOCK)
    ]


def decoded_block(block: Sequence[float], largest: int) -> list[float]:
    scale = bf16(max(map(abs, block)))
    if not scale:
        return [0.0] * len(block)
    return [scale * max(-largest, min(largest, round(value * largest / scale))) / largest for value in block]


def int8(block: Sequence[float]) -> list[float]:
    return decoded_block(block, 127)


def int4(block: Sequence[float], signs: Sequence[float]) -> list[float]:
    """A short block is followed by zeros."""
    whole = [*block, *[0.0] * (BLOCK - len(block))]
    return rotated_back(decoded_block(rotated(whole, signs), 7), signs)[: len(block)]
