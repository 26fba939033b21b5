"""Bounded dictionaries that keep their newest entries."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep_newest(kept: dict[K, V], key: K, value: V, most: int) -> None:
    """Insert `value` as the newest entry and delete the oldest ones until at most `most` remain."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > most:  # a dictionary that was loaded from disk may exceed the limit by more than one
        del kept[next(iter(kept))]
