"""Checksums that see, and mostly mend, integers that were sent modulo a window and came out one window off.

The sender adds up its unwrapped integers, each times a fixed odd weight, and sends 16 bits of the sum above the b bits that the codes
already tell. A value that decoded one window off shifts the receiver's sum by plus or minus its weight. All weights differ, up to sign,
so one such value names itself and is mended; two always leave an even shift and are seen. A difference of exactly half a window, which
could be either sign, is the same case. The design asks for detection; mending costs no bit and lets the window be narrower.
All arithmetic is on integers and the same, mirrored, on both sides of a meeting.
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch import Tensor

NUM_VALUES = 1024
MODULUS = 65536
NUM_ODD = 16384  # odd numbers below 2^15: none is another's negative


@cache
def weights(device: torch.device) -> Tensor:
    """Return the fixed odd weights, int32[1024], different from each other and from each other's negative modulo 2^16."""
    draws = bytearray(hashlib.shake_128(b"gossamer-check-weights").digest(4 * NUM_ODD))
    order = torch.sort(torch.frombuffer(draws, dtype=torch.int32), stable=True).indices[:NUM_VALUES]
    return (2 * order + 1).to(torch.int32).to(device)


def sums(integers: Tensor, scratch: Tensor, out: Tensor) -> None:
    """Write the weighted sum of each row of int32[rows, 1024], modulo 2^32, into int32[rows]."""
    torch.mul(integers, weights(integers.device), out=scratch)
    torch.sum(scratch, 1, dtype=torch.int32, out=out)


def transmitted(row_sums: Tensor, bits: int) -> Tensor:
    """Return the part of the sums that is sent: int32[rows] in [0, 2^16)."""
    return (row_sums >> bits) & (MODULUS - 1)


def shifts(differences: Tensor, own_sums: Tensor, partner_checks: Tensor, bits: int) -> Tensor:
    """Return how far each row's sum is from the partner's, in windows, modulo 2^16: int32[rows] in [0, 2^16).

    `differences` are whole numbers partner - own in [-2^(b-1), 2^(b-1)), f32[rows, 1024]; `own_sums` come from `sums`,
    `partner_checks` from `transmitted`, as received.
    """
    # Two 8-bit digits of the weights: the products' sums stay below 2^24, where f32 is exact.
    digits = (_digits(differences.device) @ differences.t()).to(torch.int32)
    decoded = own_sums + digits[0] + 256 * digits[1]
    return (partner_checks - (decoded >> bits)).bitwise_and_(MODULUS - 1)


def mend(differences: Tensor, row_shifts: Tensor, bits: int) -> Tensor:
    """Move the one value that a row's shift names by one window, in place; return which rows are good: bool[rows].

    For rows that have a shift or hold -2^(b-1). Both sides come to the same answer.
    """
    half = 2.0 ** (bits - 1)
    num_ties = (differences == -half).sum(1)
    # What really is a small difference looks like a hump within the window; two unrelated messages fill it evenly.
    hump = differences.square().mean(1) < half * half / 6
    named = _columns(differences.device)[row_shifts.long()]
    column, direction = (named.abs() - 1).clamp_(min=0), torch.sign(named)
    index = torch.arange(len(differences), device=differences.device)
    value = differences[index, column]
    # The named value must lie near the edge that it fell over from, and be the row's only tie if there is one.
    mended = (named != 0) & (direction * value <= -half / 2) & (num_ties == (value == -half))
    differences[index, column] = value + torch.where(mended, direction * 2.0 * half, 0.0)
    clean = (row_shifts == 0) & (num_ties == 1)
    return hump & (mended | clean)


@cache
def _digits(device: torch.device) -> Tensor:
    """Return the weights as low (-128..127) and high digits: f32[2, 1024]."""
    whole = weights(torch.device("cpu"))
    low = ((whole + 128) & 255) - 128
    return torch.stack((low, (whole - low) >> 8)).float().to(device)


@cache
def _columns(device: torch.device) -> Tensor:
    """Return for each shift the column that it names, plus one, with the sign of the window to add; 0 for none: int64[65536]."""
    whole = weights(torch.device("cpu")).long()
    table = torch.zeros(MODULUS, dtype=torch.int64)
    table[whole] = torch.arange(1, NUM_VALUES + 1)
    table[MODULUS - whole] = -torch.arange(1, NUM_VALUES + 1)
    return table.to(device)
