from __future__ import annotations

import math

import pytest

from gossamer.peer.machine.units import duration_s, rate_bytes_per_s, rate_text, size_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("5 Mbit/s", 625_000), ("5Mbit/s", 625_000), ("0.5 MB/s", 500_000), ("800 kbit/s", 100_000), ("unlimited", math.inf)],
)
def test_rates(text: str, bytes_per_s: float) -> None:
    assert rate_bytes_per_s(text) == bytes_per_s
    assert rate_bytes_per_s(rate_text(bytes_per_s)) == bytes_per_s


def test_sizes_and_lengths_of_time() -> None:
    assert [size_bytes(text) for text in ("20 GB", "1.5 GiB", "unlimited")] == [20e9, 1.5 * 2**30, math.inf]
    assert [duration_s(text) for text in ("90s", "30m", "2h", "1d", "15 min")] == [90, 1800, 7200, 86400, 900]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("5 mbit/s", "5 Mbit/s"),
        ("5 Mbit", "5 Mbit/s"),
        ("5 mB/s", "5 MB/s"),
        ("5 Mb/s", "5 Mbit/s"),
        ("5 Mbps", "5 Mbit/s"),
        ("5 Gbits/s", "5 Gbit/s"),
    ],
)
def test_an_unknown_unit_is_refused_with_the_nearest_one(text: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {nearest}"):
        rate_bytes_per_s(text)


@pytest.mark.parametrize("text", ["", "fast", "5", "-5 Mbit/s", "5 5 Mbit/s"])
def test_an_invalid_amount_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="5 Mbit/s|no unit"):
        rate_bytes_per_s(text)
