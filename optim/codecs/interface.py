"""The codec interface: one side's message becomes bytes, and the bytes of both sides become one gap.

Both sides of a meeting encode, exchange payloads, and call `gap`: the difference of the two *decoded* messages, the own one included.
So the two gaps are exactly each other's negative, and the pair's mean moves as if nothing were coded (docs/concepts/mathematics.md).
Codecs keep no state. Sizes depend on the number of values alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_MAGNITUDE = 2.0**96
"""No weight is larger; also keeps every difference of two decoded values finite."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One side's coded message. `payload` (uint8) goes to the partner; a codec's subclass adds what its `gap` needs later."""

    payload: Tensor
    num_values: int


@dataclass(frozen=True, slots=True)
class Gap:
    """The partner's decoded message minus the own one, and the blocks that did not decode: both sides take the solo step for these."""

    values: Tensor  # f32[n], zero in failed blocks
    failed: Tensor  # bool[num_blocks]


class Codec(ABC):
    """Turns a message u (f32[n], any device) into bytes and two messages' bytes into their gap; by default without sketch and blocks.

    `encode` raises ValueError for a message that is not finite. `gap`, and `encode` for the partner's sketch, raise ValueError for bytes
    that no honest partner sends.
    """

    name: str  # in the manifest
    wire_id: int
    block_values = 0  # number of values that fail together; 0 when no block can fail

    @abstractmethod
    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""

    def sketch_bytes(self, num_values: int) -> int:
        """Return the sketch's exact size; 0: no sketch stage."""
        return 0

    def num_blocks(self, num_values: int) -> int:
        """Return the number of blocks that can fail to decode."""
        return 0

    def sketch(self, message: Tensor, seed: int) -> Tensor:
        """Return uint8[sketch_bytes], to be sent before `encode`."""
        return torch.empty(0, dtype=torch.uint8, device=message.device)

    @abstractmethod
    def encode(self, message: Tensor, seed: int, own_sketch: Tensor, partner_sketch: Tensor) -> Encoded:
        """Return the coded message; both sides must pass the same seed."""

    @abstractmethod
    def gap(self, own: Encoded, partner_payload: Tensor, room: int = 0) -> Gap:
        """Return partner minus own, on the own message's device. `room` uninitialized values follow, for the caller to fill."""


class Packing(Codec):
    """A codec whose payload decodes by itself: `unpack(pack(x), len(x))` is near x, bit for bit the same on every device.

    gap = unpack(partner) - unpack(own). A subclass implements `payload_bytes`, `_pack` and `_unpack`, which get checked arguments.
    """

    @abstractmethod
    def _pack(self, values: Tensor) -> Tensor: ...

    @abstractmethod
    def _unpack(self, payload: Tensor, num_values: int) -> Tensor: ...

    def pack(self, values: Tensor) -> Tensor:
        """Return uint8[payload_bytes] for flat f32 values; may share memory. Raises ValueError unless all are finite and bounded."""
        require_vector(values)
        require_bounded(values, "message")
        return self._pack(values)

    def unpack(self, payload: Tensor, num_values: int) -> Tensor:
        """Return f32[num_values]; may share memory with the payload. Raises ValueError for bytes that `pack` never writes."""
        require_payload(payload, self.payload_bytes(num_values), self.name)
        return self._unpack(payload, num_values)

    def encode(self, message: Tensor, seed: int, own_sketch: Tensor, partner_sketch: Tensor) -> Encoded:
        """Pack the message; seed and sketches are not used."""
        return Encoded(self.pack(message), message.numel())

    def gap(self, own: Encoded, partner_payload: Tensor, room: int = 0) -> Gap:
        """Return unpack(partner) - unpack(own); see Codec."""
        partner = self.unpack(partner_payload.to(own.payload.device), own.num_values)
        values = partner.new_empty(own.num_values + room)
        torch.sub(partner, self.unpack(own.payload, own.num_values), out=values[: own.num_values])
        return Gap(values, torch.zeros(0, dtype=torch.bool, device=values.device))


def require_payload(payload: Tensor, num_bytes: int, name: str) -> None:
    """Raise ValueError unless `payload` is flat uint8 of exactly `num_bytes`."""
    if payload.dtype != torch.uint8 or payload.shape != (num_bytes,):
        raise ValueError(f"A {name} payload of {num_bytes} bytes was expected, not {payload.dtype} of shape {tuple(payload.shape)}.")


def require_vector(values: Tensor) -> None:
    """Raise ValueError unless `values` is flat f32."""
    if values.dtype != torch.float32 or values.dim() != 1:
        raise ValueError(f"A message is a flat float32 tensor, not {values.dtype} of shape {tuple(values.shape)}.")


def require_bounded(values: Tensor, origin: str) -> None:
    """Raise ValueError, with the origin of the values, unless they are finite and at most MAX_MAGNITUDE."""
    if values.numel() == 0:
        return
    low, high = torch.aminmax(values)  # one pass without a temporary; a NaN propagates and compares false
    if not bool((low >= -MAX_MAGNITUDE) & (high <= MAX_MAGNITUDE)):
        raise ValueError(f"The {origin} holds numbers that are not finite, or far too large to be weights.")


def aligned(payload: Tensor, itemsize: int) -> Tensor:
    """Return the payload so that it can be viewed as a wider type: itself, or a copy when its address is not aligned."""
    good = payload.is_contiguous() and payload.storage_offset() % itemsize == 0 and payload.data_ptr() % itemsize == 0
    return payload if good else payload.clone(memory_format=torch.contiguous_format)
