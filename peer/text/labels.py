"""Tokens that say whether they train, and whether they begin a document: sequences stay one tensor of integers everywhere.

A token that trains is its id, so plain text is what it always was. One that does not train, such as a prompt's, is the complement of its
id. The first token of a document has BEGINS added to its id, and never trains: nothing of its document comes before it.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BEGINS: Final = 1 << 29  # above every id
IGNORED: Final = -100  # as a target: torch's word for one without a loss
SIGN: Final = 31  # bits to the right of it: marks fit into int32
Marks = npt.NDArray[np.int32]
T = TypeVar("T", npt.NDArray[np.int32], Tensor)


def marked(ids: npt.NDArray[Any], is_trained: npt.NDArray[np.bool_]) -> Marks:
    """Return the marked tokens of one document, new, from ids and whether each trains."""
    marks = ids.astype(np.int32)
    marks[:1] += BEGINS
    is_target = is_trained.copy()
    is_target[:1] = False
    return np.where(is_target, marks, ~marks)


def _unsigned(marks: T) -> T:
    """Return tokens as if all of them trained."""
    return marks ^ (marks >> SIGN)


def beginnings(marks: Marks) -> npt.NDArray[np.int64]:
    """Return the places where documents begin."""
    return np.flatnonzero(_unsigned(marks) & BEGINS)


def ids_of(marks: Tensor) -> Tensor:
    """Return the ids of tokens, int64 as they are."""
    return _unsigned(marks) & (BEGINS - 1)


def positions_of(marks: Tensor) -> Tensor:
    """Return each token's position in its document: int64[B, L]."""
    return positions_from((_unsigned(marks) & BEGINS) != 0)


def positions_from(begins: Tensor) -> Tensor:
    """Return each token's position in its document, int64[B, L], of where documents begin, bool[B, L]; the first token begins one."""
    places = torch.arange(begins.shape[1], device=begins.device).expand_as(begins)
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def targets_of(marks: Tensor) -> Tensor:
    """Return the targets of sequences, int64[B, L] of int64[B, L+1]: each next token, IGNORED where it does not train."""
    following = marks[:, 1:]
    return torch.where(following < 0, IGNORED, following)


def num_targets(marks: Tensor) -> Tensor:
    """Return how many tokens of sequences, int64[B, L+1], train: int64[], on their device."""
    return (marks[:, 1:] >= 0).sum()
