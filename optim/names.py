"""Tables by name, for names that people mistype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

Value = TypeVar("Value")


def look_up(kind: str, name: str, table: Mapping[str, Value]) -> Value:
    """Return what has that name. Raises ValueError that names the nearest ones."""
    if name not in table:
        raise ValueError(f"There is no {kind} named {name!r}. Did you mean {nearest(name, table)}?")
    return table[name]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the known names that look most like this one, or all of them, as a list for a message."""
    known = list(names)
    return ", ".join(get_close_matches(name, known, n=3, cutoff=0.4) or known)
