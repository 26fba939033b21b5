"""Documents, and the rule that holds some of them out of training."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

HELD_OUT_SHARE = 0.05

Document = str | npt.NDArray[np.int64]
"""Text, or the tokens of a text that was tokenized before."""


def content(document: Document) -> bytes:
    """Return the bytes that `is_held_out` hashes."""
    return document.encode() if isinstance(document, str) else document.tobytes()


def is_held_out(content: bytes) -> bool:
    """Return whether content belongs to the held-out share, by its hash: the same at every peer."""
    first = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    return first < HELD_OUT_SHARE * 2**64
