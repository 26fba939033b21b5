"""Sorted positions of 64 kept values among 4096, as fixed-size bytes.

Elias-Fano: the low 6 bits of each position as they are, the high 6 in unary: bit (high part + rank) of a 128-bit row is set. 64 bytes
for 64 positions, half a bit each above the entropy, and never another length. The plain form takes 12 bits each, two positions in
three bytes. Everything runs on all chunks at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_VALUES = 4096
KEPT = 64
LOW_BITS = 6
HIGH_BYTES = (KEPT + (CHUNK_VALUES >> LOW_BITS)) // 8
ELIAS_FANO_BYTES = HIGH_BYTES + KEPT * LOW_BITS // 8
PLAIN_BYTES = KEPT * 12 // 8


def largest(chunks: Tensor) -> Tensor:
    """Return where the 64 largest magnitudes of each row of f32[chunks, 4096] are: int64[chunks, 64], ascending; ties go to the front."""
    magnitude = chunks.abs()
    threshold = torch.topk(magnitude, KEPT, dim=1).values[:, -1:]
    above, equal = magnitude > threshold, magnitude == threshold
    room = KEPT - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= room))
    return chosen.nonzero()[:, 1].view(-1, KEPT)


def pack_elias_fano(positions: Tensor) -> Tensor:
    """Return uint8[chunks, 64]."""
    places = (positions >> LOW_BITS) + torch.arange(KEPT, device=positions.device)
    unary = torch.zeros((len(positions), 8 * HIGH_BYTES), dtype=torch.uint8, device=positions.device).scatter_(1, places, 1)
    low = (positions[:, :, None] >> torch.arange(LOW_BITS, device=positions.device)) & 1
    return torch.cat((_bits_to_bytes(unary), _bits_to_bytes(low.flatten(1))), 1)


def unpack_elias_fano(packed: Tensor) -> Tensor:
    """Return the positions, int64[chunks, 64]. Raises ValueError for bytes that `pack_elias_fano` never writes."""
    bits = _bytes_to_bits(packed)
    unary, low = bits[:, : 8 * HIGH_BYTES], bits[:, 8 * HIGH_BYTES :].reshape(len(packed), KEPT, LOW_BITS)
    if not bool((unary.sum(1) == KEPT).all()) or bool(unary[:, -1].any()):
        raise ValueError("A chunk does not name exactly 64 positions.")
    high = unary.nonzero()[:, 1].view(-1, KEPT) - torch.arange(KEPT, device=packed.device)
    positions = (high << LOW_BITS) + (low.long() << torch.arange(LOW_BITS, device=packed.device)).sum(2)
    return _require_ascending(positions)


def pack_plain(positions: Tensor) -> Tensor:
    """Return uint8[chunks, 96]."""
    first, second = positions[:, 0::2], positions[:, 1::2]
    triples = torch.stack((first & 255, (first >> 8) | ((second & 15) << 4), second >> 4), 2)
    return triples.to(torch.uint8).view(len(positions), PLAIN_BYTES)


def unpack_plain(packed: Tensor) -> Tensor:
    """Return the positions, int64[chunks, 64]. Raises ValueError unless they ascend strictly."""
    triples = packed.reshape(len(packed), PLAIN_BYTES // 3, 3).long()
    first = triples[:, :, 0] | ((triples[:, :, 1] & 15) << 8)
    second = (triples[:, :, 1] >> 4) | (triples[:, :, 2] << 4)
    return _require_ascending(torch.stack((first, second), 2).view(len(packed), KEPT))


def _require_ascending(positions: Tensor) -> Tensor:
    if bool((positions[:, 1:] <= positions[:, :-1]).any()):
        raise ValueError("The positions of a chunk do not ascend.")
    return positions


def _bits_to_bytes(bits: Tensor) -> Tensor:
    octets = bits.reshape(len(bits), bits.shape[1] // 8, 8).to(torch.uint8)
    return (octets << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(2, dtype=torch.uint8)


def _bytes_to_bits(octets: Tensor) -> Tensor:
    bits = (octets[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=octets.device)) & 1
    return bits.flatten(1)
