"""Which windows of the training text an inner step reads: a shuffle that needs no state but the step's number.

Each pass over the text visits every window once, in an order that depends only on the run's seed, the peer and the pass. A position in
that order is found directly, with a small block cipher over the window numbers (format-preserving encryption by cycle walking: Black and
Rogaway, CT-RSA 2002), so a peer resumes at step n by asking for step n, bit for bit, and a permutation is never stored.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NUM_ROUNDS = 6  # a shuffle for training, not for secrecy
NUM_AT_ONCE = 512  # windows found together, for speed only: numpy takes as long for 8 numbers as for 500
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides a peer's batches, beside its text."""

    run_seed: int
    peer: bytes  # the PeerId: different peers read in different orders
    batch_size: int
    sequence_length: int

    @property
    def num_window_tokens(self) -> int:
        """Return the tokens of one sequence and the one it predicts last."""
        return self.sequence_length + 1

    @property
    def num_batch_tokens(self) -> int:
        """Return the tokens of one batch."""
        return self.batch_size * self.num_window_tokens


def batch_starts(draw: Draw, step: int, num_tokens: int) -> npt.NDArray[np.int64]:
    """Say where in a text of `num_tokens` the windows of an inner step begin: int64[B], each at most num_tokens - (L + 1).

    Windows of a pass do not overlap but in the one token that ends one and begins the next; each pass cuts the text elsewhere.
    `num_tokens` must be at least L + 1.
    """
    num_steps = max(1, NUM_AT_ONCE // draw.batch_size)
    block, row = divmod(step, num_steps)
    starts: npt.NDArray[np.int64] = _block_starts(draw, block, num_steps, num_tokens)[row]
    return starts


@functools.lru_cache(maxsize=4)
def _block_starts(draw: Draw, block: int, num_steps: int, num_tokens: int) -> npt.NDArray[np.int64]:  # [num_steps, B], shared
    num_windows = max(1, (num_tokens - 1) // draw.sequence_length - 1)
    spare = num_tokens - 1 - num_windows * draw.sequence_length
    num_positions = num_steps * draw.batch_size
    positions = np.arange(block * num_positions, (block + 1) * num_positions, dtype=np.uint64)
    passes = positions // np.uint64(num_windows)
    starts = np.empty(num_positions, dtype=np.int64)
    for number in np.unique(passes):
        *keys, shift = _secrets(draw, int(number))
        here = passes == number
        windows = permuted(positions[here] % np.uint64(num_windows), num_windows, keys)
        starts[here] = windows.astype(np.int64) * draw.sequence_length + shift % (spare + 1)
    starts.setflags(write=False)
    return starts.reshape(num_steps, draw.batch_size)


def permuted(
    indices: U64,  # each below size
    size: int,
    keys: list[int],  # NUM_ROUNDS numbers of 64 bits
) -> U64:
    """Map each index to its place in a permutation of range(size) that the keys decide. Returns a new array."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    found = _encrypted(indices, half, keys)
    while (outside := found >= np.uint64(size)).any():
        found[outside] = _encrypted(found[outside], half, keys)
    return found


def _encrypted(values: U64, half: int, keys: list[int]) -> U64:
    """A Feistel network over numbers of 2 * half bits."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right, key) & mask)
    return (left << shift) | right


def _mixed(values: U64, key: int) -> U64:
    """Scramble 64 bits; the finalizer of splitmix64 (Steele et al., OOPSLA 2014). Overflow is meant: it wraps."""
    mixed = values + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _secrets(draw: Draw, number: int) -> tuple[int, ...]:
    """The round keys of a pass, and where its first window begins."""
    message = b"gossamer-windows" + struct.pack("<qQ", draw.run_seed, number) + draw.peer
    return struct.unpack(f"<{NUM_ROUNDS + 1}Q", hashlib.blake2b(message, digest_size=8 * (NUM_ROUNDS + 1)).digest())


def cut(
    tokens: npt.NDArray[Any],  # [num_tokens], any integer type
    starts: npt.NDArray[np.int64],  # [B]
    num_window_tokens: int,
) -> npt.NDArray[np.int64]:  # [B, num_window_tokens]
    """Copy windows out of a text."""
    return np.stack([tokens[start : start + num_window_tokens] for start in starts]).astype(np.int64)


def held_out_batches(held_out: npt.NDArray[Any], draw: Draw, num_batches: int) -> list[Tensor]:
    """Cut `num_batches` batches (int64[B, L+1]) out of a held-out text, spread evenly; they overlap where it is short.

    The same at every peer with this text. It must hold at least one window.
    """
    num_windows = num_batches * draw.batch_size
    last = len(held_out) - draw.num_window_tokens
    starts = np.arange(num_windows, dtype=np.int64) * last // max(1, num_windows - 1)
    windows = torch.from_numpy(cut(held_out, starts, draw.num_window_tokens))
    return list(windows.reshape(num_batches, draw.batch_size, draw.num_window_tokens))
