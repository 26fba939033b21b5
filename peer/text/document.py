"""Documents, and the rule that holds some of them out of training."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

HELD_OUT_SHARE = 0.05

Document = str | npt.NDArray[np.int64]
"""Text, or the tokens of a text that was tokenized before."""


def is_held_out(document: Document) -> bool:
    """Return whether a document belongs to the held-out share, by the hash of its content: the same at every peer."""
    content = document.encode() if isinstance(document, str) else document.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") < HELD_OUT_SHARE * 2**64
