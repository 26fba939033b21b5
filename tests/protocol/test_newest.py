"""Bounded dictionaries keep their newest entries."""

from __future__ import annotations

from gossamer.protocol.newest import keep_newest


def test_the_oldest_entry_is_deleted_and_a_repeated_one_is_newest() -> None:
    kept: dict[str, int] = {}
    for number, key in enumerate("abacd"):
        keep_newest(kept, key, number, 3)
    assert list(kept.items()) == [("a", 2), ("c", 3), ("d", 4)]
