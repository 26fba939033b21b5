from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage


def test_limits_are_consistent() -> None:
    assert limits.CHUNK_BYTES < limits.FRAME_BYTES
    assert limits.PASSED_RECORDS * limits.RECORD_BYTES < limits.SMALL_FRAME_BYTES
    assert limits.SMALL_FRAME_BYTES < limits.FRAME_BYTES
    assert max(limits.MANIFEST_BYTES, limits.MAX_LISTED * (limits.RECORD_BYTES + 3) + 16) <= limits.CHUNK_BYTES


def test_the_largest_counts_are_exact_as_floats() -> None:
    assert float(limits.TOKENS) == limits.TOKENS
    assert datetime.fromtimestamp(limits.UNIX_SECONDS, UTC).year == 9999


@pytest.mark.parametrize("value", [-1, 11])
def test_need_count_names_the_field_and_its_range(value: int) -> None:
    limits.need_count("steps", 0, 10)
    limits.need_count("steps", 10, 10)
    with pytest.raises(BadMessage, match=f"steps is {value}, outside 0 to 10"):
        limits.need_count("steps", value, 10)


def test_need_length_names_the_field_and_its_length() -> None:
    limits.need_length("nonce", b"ab", 2)
    with pytest.raises(BadMessage, match="nonce has 1 bytes, not 2"):
        limits.need_length("nonce", b"a", 2)
