"""The windows of the training text that an inner step reads: a shuffle whose only state is the step number.

Each pass visits every window once, in an order that depends only on the run's seed, the peer and the pass
(docs/decisions/2026-11-22-window-order.md).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX_PART_WINDOWS = 1 << 18  # shuffled together: 2 MiB
IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Draw:
    """The parameters that decide a peer's batches, beside its text."""

    run_seed: int
    peer: bytes  # the PeerId: different peers read in different orders
    batch_size: int
    sequence_length: int

    @property
    def num_window_tokens(self) -> int:
        """Return the number of tokens of one sequence and its last target."""
        return self.sequence_length + 1

    @property
    def num_batch_tokens(self) -> int:
        """Return the number of tokens of one batch."""
        return self.batch_size * self.num_window_tokens


class WindowOrder:
    """The order in which one peer reads the windows of one text. Call it from one thread.

    Windows of a pass overlap only in the one token that ends a window and begins the next. A long text is read in parts of up to 2^18
    windows. Each part is spread evenly over the whole text, with its own offset. Peers read the parts in different orders.
    """

    def __init__(self, draw: Draw, num_tokens: int) -> None:
        self._draw = draw
        num_windows = max(1, (num_tokens - 1) // draw.sequence_length - 1)
        self._num_parts = -(-num_windows // MAX_PART_WINDOWS)
        self._part_windows = num_windows // self._num_parts
        self._num_spare = num_tokens - 1 - self._num_parts * self._part_windows * draw.sequence_length
        self._starts_of = lru_cache(maxsize=1)(self._shuffled)  # by part, counted from the first pass on

    def starts(self, step: int) -> IndexArray:
        """Return the positions where the windows of an inner step begin: int64[B], each at most num_tokens - (L + 1)."""
        first = step * self._draw.batch_size
        places = (divmod(position, self._part_windows) for position in range(first, first + self._draw.batch_size))
        return np.asarray([self._starts_of(part)[place] for part, place in places], dtype=np.int64)

    def _shuffled(self, part: int) -> IndexArray:
        number, place = divmod(part, self._num_parts)
        offset = permutation(random_stream(self._draw, b"parts", number), self._num_parts)[place]
        stream = random_stream(self._draw, b"windows", part)
        shift = stream.random_raw() % (self._num_spare + 1)
        windows = permutation(stream, self._part_windows) * self._num_parts + offset
        starts: IndexArray = windows * self._draw.sequence_length + shift
        return starts


def random_stream(draw: Draw, purpose: bytes, number: int) -> np.random.Philox:
    """Return the random stream of a run, a peer, a purpose and a number; numpy keeps it the same on every machine (NEP 19)."""
    message = b"gossamer-" + purpose + struct.pack("<qQ", draw.run_seed, number) + draw.peer
    return np.random.Philox(key=int.from_bytes(hashlib.blake2b(message, digest_size=16).digest(), "little"))


def permutation(stream: np.random.Philox, size: int) -> IndexArray:
    """Return range(size) in an order drawn from a stream: int64[size]."""
    # numpy does not promise that its own shuffle stays the same.
    return np.argsort(stream.random_raw(size), kind="stable").astype(np.int64, copy=False)


def cut(
    tokens: npt.NDArray[Any],  # [num_tokens], any integer type
    starts: IndexArray,  # [B]
    num_window_tokens: int,
) -> IndexArray:  # [B, num_window_tokens]
    """Copy windows out of a text."""
    return np.stack([tokens[start : start + num_window_tokens] for start in starts]).astype(np.int64)


def held_out_batches(held_out: npt.NDArray[Any], draw: Draw, num_batches: int) -> list[Tensor]:
    """Cut `num_batches` batches (int64[B, L+1]) out of a held-out text, spread evenly; they overlap if the text is short.

    They are the same at every peer with this text. The text must hold at least one window.
    """
    num_windows = num_batches * draw.batch_size
    last = len(held_out) - draw.num_window_tokens
    starts = np.arange(num_windows, dtype=np.int64) * last // max(1, num_windows - 1)
    windows = torch.from_numpy(cut(held_out, starts, draw.num_window_tokens))
    return list(windows.reshape(num_batches, draw.batch_size, draw.num_window_tokens))


def num_sequences(held_out: npt.NDArray[Any], draw: Draw) -> int:
    """Return how many windows of a text predict different tokens."""
    return (len(held_out) - 1) // draw.sequence_length
