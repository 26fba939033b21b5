"""What is put in again is the newest again, and the oldest goes."""

from __future__ import annotations

from gossamer.protocol.newest import keep_newest


def test_the_oldest_goes_and_what_comes_again_is_new() -> None:
    kept: dict[str, int] = {}
    for number, key in enumerate("abacd"):
        keep_newest(kept, key, number, 3)
    assert list(kept.items()) == [("a", 2), ("c", 3), ("d", 4)]
