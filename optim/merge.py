"""How new slow weights reach fast weights that have moved on since the snapshot.

`additive` keeps every inner step made in flight (LOSCAR-SGD, arXiv 2605.20866); `mix` is Streaming DiLoCo's (arXiv 2501.18512,
Algorithm 2, line 12), which gives part of them up. Pure functions on tensors of one shape; the results are new tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shift(new_slow: Tensor, snapshot: Tensor) -> Tensor:
    """Return what to add to the fast weights of whatever moment, so that they become `additive`'s; known before that moment comes."""
    return torch.sub(new_slow, snapshot)


def additive(new_slow: Tensor, fast_now: Tensor, snapshot: Tensor) -> Tensor:
    """Return the new fast weights: the new slow weights plus what the inner steps did since the snapshot."""
    return shift(new_slow, snapshot).add_(fast_now)


def mix(new_slow: Tensor, fast_now: Tensor, keep: float) -> Tensor:
    """Return the new fast weights: `keep` parts of the local ones, 1 - keep parts of the new slow weights.

    keep = 0 restarts from the slow weights, keep = 1 ignores them. Raises ValueError outside [0, 1].
    """
    if not 0.0 <= keep <= 1.0:
        raise ValueError(f"The share of the local weights to keep must lie in [0, 1], and is {keep}.")
    return torch.lerp(new_slow, fast_now, keep)
