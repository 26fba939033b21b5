from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from gossamer.peer.machine.units import duration_s, mbit_per_s, rate_bytes_per_s, rate_text, seconds, size_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("5 Mbit/s", 625_000),
        ("5Mbit/s", 625_000),
        ("0.5 MB/s", 500_000),
        ("800 kbit/s", 100_000),
        ("2.73 Gbit/s", 341_250_000),
        ("unlimited", math.inf),
    ],
)
def test_rates(text: str, bytes_per_s: float) -> None:
    assert rate_bytes_per_s(text) == bytes_per_s
    assert rate_bytes_per_s(rate_text(bytes_per_s)) == bytes_per_s


@pytest.mark.parametrize(
    ("mbit_per_s", "text"), [(0.25, "0.25 Mbit/s"), (999.4, "999 Mbit/s"), (999.6, "1 Gbit/s"), (2730.0, "2.73 Gbit/s")]
)
def test_a_fast_line_is_written_in_gbit(mbit_per_s: float, text: str) -> None:
    assert rate_text(mbit_per_s * 125e3) == text


def test_sizes_and_lengths_of_time() -> None:
    assert [size_bytes(text) for text in ("20 GB", "1.5 GiB", "unlimited")] == [20e9, 1.5 * 2**30, math.inf]
    assert [duration_s(text) for text in ("90s", "30m", "2h", "1d", "15 min")] == [90, 1800, 7200, 86400, 900]


@pytest.mark.parametrize("text", ["8 Mbit/s", "8Mbps", "8 mbps", "8 Mb/s", "8 Mbits/s", "1 MB/s", "1 MBps", "1 mB/s", "1 MByte/s"])
def test_a_rate_is_read_as_people_write_it(text: str) -> None:
    assert rate_bytes_per_s(text) == 1e6
    assert mbit_per_s(text) == pytest.approx(8.0)


def test_a_plain_number_is_in_the_unit_of_its_option() -> None:
    assert (mbit_per_s("20"), seconds("1.5"), seconds("1e3"), seconds("2 min")) == (20.0, 1.5, 1000.0, 120.0)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "1e999", ""])
def test_what_is_no_finite_amount_is_refused(text: str) -> None:
    for read in (seconds, mbit_per_s):
        with pytest.raises(ValueError, match="write it like"):
            read(text)


@pytest.mark.parametrize("text", ["2s", "2 s", "2 sec", "2 seconds", "2 Seconds"])
def test_a_duration_is_read_as_people_write_it(text: str) -> None:
    assert duration_s(text) == 2.0


def test_days_and_weeks() -> None:
    assert [duration_s(text) for text in ("2 days", "2d", "1 day", "1 week", "0.5h")] == [172800, 172800, 86400, 604800, 1800]


def test_sizes_are_read_in_any_case() -> None:
    assert [size_bytes(text) for text in ("20gb", "20 GB", "1 gib", "5 bytes")] == [20e9, 20e9, 2**30, 5]


def test_a_rate_that_may_be_bits_or_bytes_is_refused_with_both() -> None:
    with pytest.raises(ValueError, match="5 Mbit/s or 5 MB/s"):
        rate_bytes_per_s("5 mb/s")


@pytest.mark.parametrize(("text", "nearest"), [("5 Mbit", "5 Mbit/s"), ("5 Gbt/s", "5 Gbit/s")])
def test_an_unknown_unit_is_refused_with_the_nearest_one(text: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {nearest}"):
        rate_bytes_per_s(text)


@pytest.mark.parametrize(
    ("read", "text", "example"), [(duration_s, "2x", "30m"), (rate_bytes_per_s, "2xx", "5 Mbit/s"), (size_bytes, "2q", "20 GB")]
)
def test_a_unit_that_is_like_no_other_is_refused_with_an_example(read: Callable[[str], float], text: str, example: str) -> None:
    with pytest.raises(ValueError, match=f"there is no unit .*; write it like {example}"):
        read(text)


@pytest.mark.parametrize("text", ["5", "5 fortnights", "", "-2h", "1e9 days"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 30m|did you mean|hundred years"):
        duration_s(text)


@pytest.mark.parametrize("text", ["", "fast", "5", "-5 Mbit/s", "5 5 Mbit/s"])
def test_an_invalid_amount_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="5 Mbit/s|no unit"):
        rate_bytes_per_s(text)
