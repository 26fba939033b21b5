"""Codecs of what passes between the stages of a model: hidden states on their way forward, their gradients on the way back.

fp32, bf16: every value as a number of its own, little-endian.
int8: as in `packings`, but with blocks of 64; 8.25 bit.
int4: the same with 4 bits of the block's randomized Hadamard rotation, which spreads outliers; 4.25 bit.

Layout of int8 and int4: all scales (little-endian bf16, for fp16 would lose gradients below 6e-8), then all codes. Blocks of 64 divide the
width of usual models, so a token does not touch its neighbours. The last block may be short: int8 sends no codes for what is missing, int4
sends a whole block. Each code is the nearest one. Unlike with codecs of weights, two machines need not decode equal bits of int4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Final

import torch
from torch import Tensor

from gossamer.optim.codecs.hadamard import hadamard_matrix, sign_pool
from gossamer.optim.codecs.interface import Packing, require_bounded
from gossamer.optim.codecs.packings import DENSE, Int8, blocks, num_blocks, pack_codes, read_scales, unpack_codes

BLOCK_VALUES: Final = 64
SCALE_BYTES: Final = 2
LARGEST_NIBBLE: Final = 7
_NIBBLE_OFFSET: Final = 8  # a code of 4 bits travels as code + 8; 0 is never sent
_SIGN_SEED: Final = 0


class Int4Activations(Packing):
    """Signed 4-bit codes of rotated blocks, to nearest: a block of normal values is off by about 10 % of its length."""

    name = "int4"

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return (SCALE_BYTES + BLOCK_VALUES // 2) * num_blocks(num_values, BLOCK_VALUES)

    def _pack(self, values: Tensor) -> Tensor:
        rotated = blocks(values, BLOCK_VALUES) @ _rotation(values.device)
        require_bounded(rotated, "message")
        scales = rotated.abs().amax(1).bfloat16()
        steps = scales.float() / LARGEST_NIBBLE
        codes = (rotated / torch.where(steps > 0, steps, 1.0)[:, None]).round_().clamp_(-LARGEST_NIBBLE, LARGEST_NIBBLE)
        return torch.cat((scales.view(torch.uint8), pack_codes((codes.view(-1) + _NIBBLE_OFFSET).to(torch.uint8), 4)))

    def _unpack(self, payload: Tensor, num_values: int) -> Tensor:
        scales = read_scales(payload, num_blocks(num_values, BLOCK_VALUES), self.name)
        codes = unpack_codes(payload[SCALE_BYTES * len(scales) :], 4, BLOCK_VALUES * len(scales))
        if not bool(codes.all()):
            raise ValueError("The int4 payload holds the code -8, which is never sent.")
        rows = (codes.float() - _NIBBLE_OFFSET).view(-1, BLOCK_VALUES).mul_((scales / LARGEST_NIBBLE)[:, None])
        values: Tensor = rows @ _rotation(payload.device).t()
        return values.view(-1)[:num_values]


@cache
def _rotation(device: torch.device) -> Tensor:
    """Return the rotation of a block, signs included: an orthogonal f32[64, 64]; row vectors are multiplied from the left."""
    side = hadamard_matrix(torch.device("cpu"))
    doubled = torch.cat((torch.cat((side, side), 1), torch.cat((side, -side), 1)))
    signs = sign_pool(_SIGN_SEED, 1, torch.device("cpu"))[:BLOCK_VALUES]
    return (signs[:, None] * doubled / math.sqrt(BLOCK_VALUES)).to(device)


ACTIVATIONS: Final[Mapping[str, Packing]] = {codec.name: codec for codec in (*DENSE, Int8(BLOCK_VALUES), Int4Activations())}
