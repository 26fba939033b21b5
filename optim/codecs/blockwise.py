"""Packings with one bf16 scale per block of consecutive values.

int8: blocks of 256, scale = the block's largest magnitude, 8.0625 bit per value.
Layout: all scales (little-endian), then all codes; the last block may be short and is coded as if followed by zeros. Decoding only
multiplies: the result is the same bit for bit on every device (dividing by a constant is not).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from optim.codecs.interface import MAX_MAGNITUDE, aligned, require_message, require_payload

LARGEST_CODE = 127
UNIT = float(torch.tensor(1.0 / LARGEST_CODE, dtype=torch.float32))


def num_blocks(num_values: int, block_values: int) -> int:
    """Return how many blocks hold `num_values`, the last one perhaps short."""
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


class Int8:
    """Signed 8-bit codes, to nearest, against the block's largest magnitude."""

    name = "int8"
    wire_id = 2
    block_values = 256

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return 2 * num_blocks(num_values, self.block_values) + num_values

    def pack(self, values: Tensor) -> Tensor:
        """Return scales and codes."""
        require_message(values)
        rows = blocks(values, self.block_values)
        scales = rows.abs().amax(1).bfloat16() if values.numel() else values.bfloat16()
        steps = scales.float().mul_(UNIT)
        scaled = rows / torch.where(steps > 0, steps, 1.0)[:, None]
        codes = scaled.round_().clamp_(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
        return torch.cat((scales.view(torch.uint8), codes.view(-1)[: values.numel()].view(torch.uint8)))

    def unpack(self, payload: Tensor, num_values: int) -> Tensor:
        """Return f32[num_values], each within scale * (1/254 + 2^-8) of what was packed."""
        require_payload(payload, self.payload_bytes(num_values), self.name)
        num_scales = num_blocks(num_values, self.block_values)
        steps = read_scales(payload, num_scales, self.name).mul_(UNIT)
        codes = payload[2 * num_scales :].view(torch.int8)
        if bool((codes < -LARGEST_CODE).any()):
            raise ValueError("The int8 payload holds the code -128, which is never sent.")
        rows = blocks(codes.float(), self.block_values).mul_(steps[:, None])
        return rows.view(-1)[:num_values]
