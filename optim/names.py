"""Tables of methods, codecs and optimizers by name, and the error for a name that is not in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

Value = TypeVar("Value")
MAX_LISTED = 16


def look_up(kind: str, name: str, table: Mapping[str, Value]) -> Value:
    """Return the entry of that name. Raises ValueError with a suggestion."""
    if name not in table:
        raise ValueError(f"There is no {kind} named {name!r}: {suggestion(name, table)}.")
    return table[name]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the known names that look most like it, and all of them where they are few."""
    names = list(known)
    close = get_close_matches(name, names, n=3, cutoff=0.4)
    parts = [f"did you mean {' or '.join(close)}?"] if close else []
    if len(names) <= MAX_LISTED or not close:
        parts.append(f"choose from {', '.join(names)}")
    return " ".join(parts)
