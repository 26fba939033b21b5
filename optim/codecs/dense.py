"""Packings that keep every value as a number of its own: fp32 (exact) and bf16.

Little-endian, in the order of the flat vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim.codecs.interface import aligned, require_decoded, require_message, require_payload


class Dense:
    """Values as `dtype`, nothing else."""

    def __init__(self, name: str, wire_id: int, dtype: torch.dtype) -> None:
        self.name = name
        self.wire_id = wire_id
        self._dtype = dtype

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return num_values * self._dtype.itemsize

    def pack(self, values: Tensor) -> Tensor:
        """Return the values' bytes; fp32 shares memory with `values` where it can."""
        require_message(values)
        return values.contiguous().to(self._dtype).view(torch.uint8)

    def unpack(self, payload: Tensor, num_values: int) -> Tensor:
        """Return f32[num_values]; fp32 shares memory with `payload` where it can."""
        require_payload(payload, self.payload_bytes(num_values), self.name)
        values = aligned(payload, self._dtype.itemsize).view(self._dtype).float()
        require_decoded(values, self.name)
        return values
