"""Packings that keep the 64 largest of every 4096 values, at 2 bits each, for pseudo-gradients with error feedback.

After SparseLoCo (arXiv 2508.15706), with the sizes of Covenant-72B (arXiv 2603.08163). Chunks are runs of the flat vector, the last one
padded with zeros. Only positions cost: values take 2 bits, a sign and whether the magnitude is above the mean of those kept.
topk:   positions as Elias-Fano, two bf16 levels per chunk; .1641 bit per value. Layout: levels (small, large) of all chunks, then per
        chunk 64 bytes of positions and 16 of values (sign bit, magnitude bit; first value lowest). Elias-Fano: the high 6 bits of each
        position in unary, bit (high part + rank) of 128 is set; then the low 6 bits as they are.
topk12: 12-bit positions, two in three bytes, one table of four f32 levels and their shift for all chunks; .21875 bit per value + 20
        bytes. Layout: table, shift, then per chunk 96 bytes of positions and 16 of values. Bins as in the SparseLoCo reference code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.optim.codecs.interface import MAX_MAGNITUDE, Packing, aligned
from gossamer.optim.codecs.packings import blocks, num_blocks, pack_codes, root_mean_square, unpack_codes

CHUNK_VALUES = 4096
KEPT = 64
LOW_BITS = 6
UNARY_BITS = KEPT + (CHUNK_VALUES >> LOW_BITS)
ELIAS_FANO_BYTES = (UNARY_BITS + KEPT * LOW_BITS) // 8
PLAIN_BYTES = KEPT * 12 // 8
VALUE_BYTES = 2 * KEPT // 8
TABLE_BYTES = 20


class TopK(Packing):
    """Elias-Fano positions; per chunk two levels, the means of the kept magnitudes up to and above their mean."""

    name = "topk"
    wire_id = 7

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return num_blocks(num_values, CHUNK_VALUES) * (4 + ELIAS_FANO_BYTES + VALUE_BYTES)

    def _pack(self, values: Tensor) -> Tensor:
        places, kept = _keep(values)
        magnitude = kept.abs()
        large = magnitude > magnitude.mean(1, keepdim=True)
        levels = torch.stack((_group_mean(magnitude, ~large), _group_mean(magnitude, large)), 1).bfloat16()
        codes = (kept < 0).to(torch.uint8) + 2 * large.to(torch.uint8)
        body = torch.cat((pack_elias_fano(places), _pack_codes(codes)), 1)
        return torch.cat((levels.view(-1).view(torch.uint8), body.view(-1)))

    def _unpack(self, payload: Tensor, num_values: int) -> Tensor:
        count = num_blocks(num_values, CHUNK_VALUES)
        levels = aligned(payload[: 4 * count], 2).view(torch.bfloat16).view(count, 2).float()
        _require_levels(levels, 0.0, self.name)
        body = payload[4 * count :].view(count, ELIAS_FANO_BYTES + VALUE_BYTES)
        places = unpack_elias_fano(body[:, :ELIAS_FANO_BYTES])
        codes = _unpack_codes(body[:, ELIAS_FANO_BYTES:])
        return _spread(places, levels.gather(1, codes >> 1) * (1 - 2 * (codes & 1)), num_values)


class TopK12(Packing):
    """12-bit positions; one table of four levels for all, in bins of 1.5 standard deviations about the mean of what was kept."""

    name = "topk12"
    wire_id = 8

    def payload_bytes(self, num_values: int) -> int:
        """Return the payload's exact size."""
        return TABLE_BYTES + num_blocks(num_values, CHUNK_VALUES) * (PLAIN_BYTES + VALUE_BYTES)

    def _pack(self, values: Tensor) -> Tensor:
        places, kept = _keep(values)
        shift = kept.mean() if kept.numel() else kept.new_zeros(())
        centred = kept - shift
        width = 1.5 * root_mean_square(centred.view(1, -1), kept.numel()) if kept.numel() else kept.new_ones(1)
        codes = (centred / width.clamp(min=torch.finfo(torch.float32).tiny) + 2.0).round_().clamp_(0, 3).to(torch.uint8)
        table = torch.cat([_group_mean(centred.view(1, -1), codes.view(1, -1) == code) for code in range(4)] + [shift.view(1)])
        body = torch.cat((pack_plain(places), _pack_codes(codes)), 1)
        return torch.cat((table.view(torch.uint8), body.view(-1)))

    def _unpack(self, payload: Tensor, num_values: int) -> Tensor:
        table = aligned(payload[:TABLE_BYTES], 4).view(torch.float32)
        _require_levels(table, -MAX_MAGNITUDE, self.name)
        body = payload[TABLE_BYTES:].view(num_blocks(num_values, CHUNK_VALUES), PLAIN_BYTES + VALUE_BYTES)
        places = unpack_plain(body[:, :PLAIN_BYTES])
        levels = table[:4] + table[4]
        return _spread(places, levels[_unpack_codes(body[:, PLAIN_BYTES:])], num_values)


def _keep(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the largest values of each chunk are, and what they are: int64 and f32 [chunks, 64]."""
    chunks = blocks(values, CHUNK_VALUES)
    places = largest_places(chunks)
    return places, chunks.gather(1, places)


def _spread(places: Tensor, kept: Tensor, num_values: int) -> Tensor:
    """Put the kept values back in their places among zeros; what lies in the padding is dropped."""
    chunks = torch.zeros((len(places), CHUNK_VALUES), dtype=torch.float32, device=places.device)
    return chunks.scatter_(1, places, kept).view(-1)[:num_values]


def _group_mean(values: Tensor, members: Tensor) -> Tensor:
    """Return each row's mean over its members; 0 where there are none."""
    share = members.float() / members.sum(1, keepdim=True).clamp(min=1)
    return (values * share).sum(1)


def _pack_codes(codes: Tensor) -> Tensor:
    return pack_codes(codes.view(-1), 2).view(-1, VALUE_BYTES)


def _unpack_codes(packed: Tensor) -> Tensor:
    return unpack_codes(packed.reshape(-1), 2, len(packed) * KEPT).view(-1, KEPT).long()


def _require_levels(levels: Tensor, lowest: float, name: str) -> None:
    if not bool(((levels >= lowest) & (levels <= MAX_MAGNITUDE)).all()):
        raise ValueError(f"The {name} payload holds a level that is out of range or not finite.")


def largest_places(chunks: Tensor) -> Tensor:
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
    unary = torch.zeros((len(positions), UNARY_BITS), dtype=torch.uint8, device=positions.device).scatter_(1, places, 1)
    low = (positions[:, :, None] >> torch.arange(LOW_BITS, device=positions.device)) & 1
    bits = torch.cat((unary, low.flatten(1).to(torch.uint8)), 1)
    return pack_codes(bits.view(-1), 1).view(-1, ELIAS_FANO_BYTES)


def unpack_elias_fano(packed: Tensor) -> Tensor:
    """Return the positions, int64[chunks, 64]. Raises ValueError for bytes that `pack_elias_fano` never writes."""
    bits = unpack_codes(packed.reshape(-1), 1, 8 * packed.numel()).view(-1, 8 * ELIAS_FANO_BYTES)
    unary, low = bits[:, :UNARY_BITS], bits[:, UNARY_BITS:].reshape(len(packed), KEPT, LOW_BITS)
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
