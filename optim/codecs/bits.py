"""Small codes in bytes, in order: the first code sits in the lowest bits of the first byte."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def num_bytes(num_codes: int, bits: int) -> int:
    """Return how many bytes hold so many codes of 1, 2 or 4 bits."""
    return -(-num_codes * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return uint8[num_bytes] for flat uint8 codes in [0, 2^bits), bits 1, 2 or 4; what is left of the last byte is zero."""
    per_byte = 8 // bits
    columns = functional.pad(codes, (0, -codes.numel() % per_byte)).view(-1, per_byte)
    packed = columns[:, 0].clone()
    for place in range(1, per_byte):
        packed.bitwise_or_(columns[:, place] << (place * bits))
    return packed


def unpack(packed: Tensor, bits: int, num_codes: int) -> Tensor:
    """Return the first `num_codes` uint8 codes that `pack` wrote."""
    per_byte = 8 // bits
    columns = torch.empty((packed.numel(), per_byte), dtype=torch.uint8, device=packed.device)
    for place in range(per_byte):
        columns[:, place] = (packed >> (place * bits)) & (2**bits - 1)
    return columns.view(-1)[:num_codes]


def require_clean_end(packed: Tensor, bits: int, num_codes: int, name: str) -> None:
    """Raise ValueError unless the bits after the last code are zero, so that every message has one form only."""
    used = num_codes * bits % 8
    if used and bool(packed[-1] >> used):
        raise ValueError(f"The {name} payload has bits set after its last code.")
