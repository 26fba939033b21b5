"""Checksums that detect, and mostly correct, integers that were sent modulo a window and decoded one window off.

The sender adds up its unwrapped integers, each times a fixed odd weight, and sends 16 bits of the sum above the b bits that the codes
already contain. A value that decoded one window off shifts the receiver's sum by plus or minus its weight. All weights differ, up to sign,
so the shift identifies a single such value, which is corrected. Two always leave an even shift, which is detected. A difference of exactly
half a window, which could have either sign, is the same case. Both sides of a meeting compute the same, mirrored, on integers.
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


def sent_bits(row_sums: Tensor, bits: int) -> Tensor:
    """Return the bits of the sums that are sent: int32[rows] in [0, 2^16)."""
    return (row_sums >> bits) & (MODULUS - 1)


def sum_differences(differences: Tensor, own_sums: Tensor, partner_checks: Tensor, bits: int) -> Tensor:
    """Return the difference of each row's sum to the partner's, in windows, modulo 2^16: int32[rows] in [0, 2^16).

    `differences` are whole numbers partner - own in [-2^(b-1), 2^(b-1)), f32[rows, 1024]; `own_sums` come from `sums`,
    `partner_checks` from `sent_bits`, as received.
    """
    # Two 8-bit digits of the weights: the products' sums stay below 2^24, where f32 is exact.
    digits = (_digits(differences.device) @ differences.t()).to(torch.int32)
    decoded = own_sums + digits[0] + 256 * digits[1]
    return (partner_checks - (decoded >> bits)).bitwise_and_(MODULUS - 1)


def correct_wrapped(differences: Tensor, row_shifts: Tensor, bits: int) -> Tensor:
    """Move the value that a row's shift identifies by one window, in place; return the rows that are correct now: bool[rows].

    For rows that have a shift or hold -2^(b-1). Both sides get the same answer.
    """
    half = 2.0 ** (bits - 1)
    num_ties = (differences == -half).sum(1)
    # A small difference is concentrated within the window; the difference of two unrelated messages is uniform in it.
    is_small = differences.square().mean(1) < half * half / 6
    named = _columns(differences.device)[row_shifts.long()]
    column, direction = (named.abs() - 1).clamp_(min=0), torch.sign(named)
    index = torch.arange(len(differences), device=differences.device)
    value = differences[index, column]
    # The identified value must lie near the edge that it wrapped around, and be the row's only tie if there is one.
    corrected = (named != 0) & (direction * value <= -half / 2) & (num_ties == (value == -half))
    differences[index, column] = value + torch.where(corrected, direction * 2.0 * half, 0.0)
    clean = (row_shifts == 0) & (num_ties == 1)
    return is_small & (corrected | clean)


@cache
def _digits(device: torch.device) -> Tensor:
    """Return the weights as low (-128..127) and high digits: f32[2, 1024]."""
    whole = weights(torch.device("cpu"))
    low = ((whole + 128) & 255) - 128
    return torch.stack((low, (whole - low) >> 8)).float().to(device)


@cache
def _columns(device: torch.device) -> Tensor:
    """Return for each shift the column that it identifies, plus one, with the sign of the window to add; 0 for none: int64[65536]."""
    whole = weights(torch.device("cpu")).long()
    table = torch.zeros(MODULUS, dtype=torch.int64, device=whole.device)
    columns = torch.arange(1, NUM_VALUES + 1, device=whole.device)
    table[whole] = columns
    table[MODULUS - whole] = -columns
    return table.to(device)
