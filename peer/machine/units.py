"""Parse rates, sizes and durations like "5 Mbit/s", "20 GB", "2h". The error for an unknown unit names the nearest known one."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import Final

UNLIMITED: Final = "unlimited"

RATES: Final = {  # in bytes a second
    "kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "KiB/s": 2.0**10, "MiB/s": 2.0**20,
}  # fmt: skip
SIZES: Final = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}  # in bytes
DURATIONS: Final = {  # in seconds
    "s": 1.0, "m": 60.0, "min": 60.0, "minutes": 60.0, "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip

_BITS = re.compile(r"b(?:ps|/s)$")  # a small b is a bit, as in Mbps
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(\S*)")


def rate_bytes_per_s(text: str) -> float:
    """Read a rate like "5 Mbit/s", infinity for "unlimited". Raises ValueError."""
    return math.inf if text == UNLIMITED else _amount(text, RATES, "5 Mbit/s")


def size_bytes(text: str) -> float:
    """Read a size like "20 GB", infinity for "unlimited". Raises ValueError."""
    return math.inf if text == UNLIMITED else _amount(text, SIZES, "20 GB")


def duration_s(text: str) -> float:
    """Read a duration like "90s", "30m", "2h" or "1d". Raises ValueError."""
    return _amount(text, DURATIONS, "2h")


def _amount(text: str, units: Mapping[str, float], example: str) -> float:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"write it like {example}")
    number, unit = match.groups()
    if unit not in units:
        raise ValueError(
            f"there is no unit {unit!r}; did you mean {number} {_nearest(unit, units)}?" if unit else f"write it like {example}"
        )
    return float(number) * units[unit]


def _nearest(unit: str, units: Mapping[str, float]) -> str:
    by_lower = {known.lower(): known for known in units}
    spelt_out = _BITS.sub("bit/s", unit).lower()
    return by_lower[difflib.get_close_matches(spelt_out, by_lower, n=1, cutoff=0.0)[0]]


def rate_text(bytes_per_s: float) -> str:
    """Write a rate in the unit that people use for lines."""
    return UNLIMITED if math.isinf(bytes_per_s) else f"{bytes_per_s / 125e3:.3g} Mbit/s"
