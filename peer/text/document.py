"""A document, and whether it is ever trained on."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

HELD_OUT_SHARE = 0.05

Document = str | npt.NDArray[np.int64]
"""Text, or the tokens that somebody has made of it before."""


def content(document: Document) -> bytes:
    """Return what `is_held_out` decides by."""
    return document.encode() if isinstance(document, str) else document.tobytes()


def is_held_out(content: bytes) -> bool:
    """Decide by hash whether something belongs to the held-out share, the same way at every peer."""
    first = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    return first < HELD_OUT_SHARE * 2**64
