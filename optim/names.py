"""Names that people mistype."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the known names that look most like this one, or all of them, as a list for a message."""
    known = list(names)
    return ", ".join(get_close_matches(name, known, n=3, cutoff=0.4) or known)
