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


def mend(differences: Tensor, own_sums: Tensor, partner_checks: Tensor, bits: int) -> Tensor:
    """Mend f32[rows, 1024] whole differences partner - own in place and return which rows cannot be: bool[rows], equal on both sides.

    Differences lie in [-2^(b-1), 2^(b-1)); `own_sums` are from `sums`, `partner_checks` from `transmitted`, as received. Rows that
    cannot be mended are set to zero.
    """
    shifts = _shifts(differences, own_sums, partner_checks, bits)
    tied = differences.amin(1) == -(2.0 ** (bits - 1)) if len(differences) else shifts != 0
    suspects = ((shifts != 0) | tied).nonzero().view(-1)
    failed = torch.zeros(len(differences), dtype=torch.bool, device=differences.device)
    if len(suspects):
        rows, good = _mend_rows(differences[suspects], shifts[suspects], bits)
        differences[suspects] = torch.where(good[:, None], rows, 0.0)
        failed[suspects] = ~good
    return failed


def _shifts(differences: Tensor, own_sums: Tensor, partner_checks: Tensor, bits: int) -> Tensor:
    """Return how far each row's sum is from the partner's, in windows, modulo 2^16: int32 in [0, 2^16)."""
    # Two 8-bit digits of the weights: the products' sums stay below 2^24, where f32 is exact.
    products = (differences @ _digits(differences.device)).to(torch.int32)
    decoded = own_sums + products[:, 0] + 256 * products[:, 1]
    return (partner_checks - (decoded >> bits)) & (MODULUS - 1)


def _mend_rows(rows: Tensor, shifts: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Move the one value that a row's shift names by one window, in place; return the rows and which of them are good."""
    half = 2.0 ** (bits - 1)
    num_ties = (rows == -half).sum(1)
    # What really is a small difference looks like a hump within the window; two unrelated messages fill it evenly.
    hump = rows.square().mean(1) < half * half / 6
    named = _columns(rows.device)[shifts.long()]
    column, direction = (named.abs() - 1).clamp_(min=0), torch.sign(named)
    index = torch.arange(len(rows), device=rows.device)
    value = rows[index, column]
    # The named value must lie near the edge that it fell over from, and be the row's only tie if there is one.
    mended = (named != 0) & (direction * value <= -half / 2) & (num_ties == (value == -half))
    rows[index, column] = value + torch.where(mended, direction * 2.0 * half, 0.0)
    clean = (shifts == 0) & (num_ties == 1)
    return rows, hump & (mended | clean)


@cache
def _digits(device: torch.device) -> Tensor:
    """Return the weights as low (-128..127) and high digits: f32[1024, 2]."""
    whole = weights(torch.device("cpu"))
    low = ((whole + 128) & 255) - 128
    return torch.stack((low, (whole - low) >> 8), 1).float().to(device)


@cache
def _columns(device: torch.device) -> Tensor:
    """Return for each shift the column that it names, plus one, with the sign of the window to add; 0 for none: int64[65536]."""
    whole = weights(torch.device("cpu")).long()
    table = torch.zeros(MODULUS, dtype=torch.int64)
    table[whole] = torch.arange(1, NUM_VALUES + 1)
    table[MODULUS - whole] = -torch.arange(1, NUM_VALUES + 1)
    return table.to(device)
