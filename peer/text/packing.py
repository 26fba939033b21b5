"""Conversations as sequences of one length: whole documents side by side, and padding that does not train. None is cut in the middle."""

from __future__ import annotations

from typing import Self

import numpy as np
import numpy.typing as npt

from gossamer.peer.text.batches import IndexArray
from gossamer.peer.text.labels import Marks, beginnings


class PackedSequences:
    """The sequences of some documents, in their order. A document longer than a sequence loses its end.

    A document of which then nothing trains is left out, so that each sequence has a target.
    """

    def __init__(self, marks: Marks, num_window_tokens: int, padding: int, *, shares: bool) -> None:
        """Pack marked tokens; `shares`: several documents in one sequence, as many as fit. `padding` is the id of a token."""
        firsts = beginnings(marks)
        ends = np.minimum(np.append(firsts[1:], len(marks)), firsts + num_window_tokens)
        targets = np.append(0, np.cumsum(marks >= 0))
        num_targets = targets[ends] - targets[firsts]
        self._marks = marks
        self._width = num_window_tokens
        self._padding = ~padding
        self._firsts, self._ends = firsts[num_targets > 0], ends[num_targets > 0]
        self._bounds = _bounds(self._ends - self._firsts, num_window_tokens if shares else 0)
        self.num_targets = int(num_targets.sum())

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def part(self, first: int, end: int) -> Self:
        """Return some of the sequences, of the same tokens."""
        some = object.__new__(type(self))
        vars(some).update(vars(self))
        some._bounds = self._bounds[first : end + 1]
        return some

    def sequences(self, numbers: IndexArray) -> npt.NDArray[np.int64]:
        """Return the sequences of these numbers, new: int64[n, num_window_tokens], marked."""
        rows = np.full((len(numbers), self._width), self._padding, dtype=np.int64)
        for row, number in zip(rows, numbers, strict=True):
            at = 0
            for document in range(self._bounds[number], self._bounds[number + 1]):
                tokens = self._marks[self._firsts[document] : self._ends[document]]
                row[at : at + len(tokens)] = tokens
                at += len(tokens)
        return rows


def _bounds(lengths: npt.NDArray[np.int64], room: int) -> list[int]:
    """Return the number of the first document of each sequence, and one past the last: next fit, which keeps their order."""
    bounds, used = [0], 0
    for number, length in enumerate(lengths.tolist()):
        if used and used + length > room:
            bounds.append(number)
            used = 0
        used += length
    return [*bounds, len(lengths)] if len(lengths) else [0]
