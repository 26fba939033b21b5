"""Memory that is bounded: the newest so many of something are kept."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep_newest(kept: dict[K, V], key: K, value: V, most: int) -> None:
    """Put in a value as the newest; the oldest go where there are more than `most` then."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > most:  # what was read from a disk may be more than one too many
        del kept[next(iter(kept))]
