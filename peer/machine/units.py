"""Rates, sizes and durations like "5 Mbit/s", "20 GB", "2h": the one place where units are read and written.

Units may be written as people do: "5 Mbps", "20gb", "2 days". An error names what would do.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Final

UNLIMITED: Final = "unlimited"

PREFIXES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
DURATIONS: Final = {  # in seconds
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "week", "weeks"), 7 * 86400.0),
}  # fmt: skip
MAX_DURATION_S: Final = 100 * 365 * 86400.0
RATE_EXAMPLES: Final = ("kbit/s", "Mbit/s", "Gbit/s", "kB/s", "MB/s", "GB/s")
LEAST_LIKENESS: Final = 0.4  # of a unit that is offered in place of an unknown one
SIZE_EXAMPLES: Final = ("kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(\S*)")
_NUMBER = re.compile(r"\s*(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,2})?\s*", re.ASCII | re.IGNORECASE)  # neither "nan" nor "-1"
_RATE = re.compile(r"([kmg]i?)?(bits?|bytes?|b)(/s|/sec|ps)", re.IGNORECASE)
_SIZE = re.compile(r"([kmgt]i?)?(b|bytes?)", re.IGNORECASE)


def rate_bytes_per_s(text: str) -> float:
    """Read a rate like "5 Mbit/s", infinity for "unlimited". Raises ValueError."""
    if text == UNLIMITED:
        return math.inf
    number, unit = _parts(text, "5 Mbit/s")
    match = _RATE.fullmatch(unit)
    if match is None:
        raise _unknown(number, unit, RATE_EXAMPLES, "5 Mbit/s")
    prefix, what, per_s = (part or "" for part in match.groups())
    if what == "b" and per_s != "ps" and not prefix.isupper():
        raise ValueError(f"{unit!r} may be bits or bytes: write {number} {prefix.upper()}bit/s or {number} {prefix.upper()}B/s")
    is_bytes = what == "B" or what.lower().startswith("byte")
    return float(number) * PREFIXES[prefix.lower()] / (1.0 if is_bytes else 8.0)


def mbit_per_s(text: str) -> float:
    """Read a rate in Mbit/s: a plain number, or a rate with its unit. Raises ValueError."""
    return float(text) if _NUMBER.fullmatch(text) else rate_bytes_per_s(text) * 8e-6


def size_bytes(text: str) -> float:
    """Read a size like "20 GB", infinity for "unlimited". Raises ValueError."""
    if text == UNLIMITED:
        return math.inf
    number, unit = _parts(text, "20 GB")
    match = _SIZE.fullmatch(unit)
    if match is None:
        raise _unknown(number, unit, SIZE_EXAMPLES, "20 GB")
    return float(number) * PREFIXES[(match[1] or "").lower()]


def duration_s(text: str) -> float:
    """Read a duration like "90s", "30m", "2h" or "2 days". Raises ValueError."""
    number, unit = _parts(text, "30m, 2h or 2 days")
    if unit.lower() not in DURATIONS:
        raise _unknown(number, unit, ("s", "min", "h", "days", "weeks"), "30m, 2h or 2 days")
    seconds = float(number) * DURATIONS[unit.lower()]
    if seconds > MAX_DURATION_S:
        raise ValueError("it is longer than a hundred years")
    return seconds


def seconds(text: str) -> float:
    """Read a number of seconds: a plain number, or a duration with its unit. Raises ValueError."""
    return float(text) if _NUMBER.fullmatch(text) else duration_s(text)


def _parts(text: str, example: str) -> tuple[str, str]:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"write it like {example}")
    return match[1], match[2]


def _unknown(number: str, unit: str, known: Iterable[str], example: str) -> ValueError:
    if not unit:
        return ValueError(f"write it like {example}")
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(unit.lower(), by_lower, n=1, cutoff=LEAST_LIKENESS)
    what_would_do = f"did you mean {number} {by_lower[near[0]]}?" if near else f"write it like {example}"
    return ValueError(f"there is no unit {unit!r}; {what_would_do}")


def bytes_text(num_bytes: float) -> str:
    """Write a size in the unit that leaves one to three digits before the point, with one decimal below a hundred."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 99.95 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def rate_text(bytes_per_s: float) -> str:
    """Write a rate in the unit that people use for lines."""
    if math.isinf(bytes_per_s):
        return UNLIMITED
    mbit_per_s = bytes_per_s / 125e3
    return f"{mbit_per_s:.3g} Mbit/s" if mbit_per_s < 999.5 else f"{mbit_per_s / 1000:.3g} Gbit/s"


def percent_text(share: float) -> str:
    """Write a share in whole per cent."""
    return f"{100 * share:.0f} %"


def steps_text(interval_steps: int) -> str:
    """Return an interval in words: 1 step, 2 steps."""
    return f"{interval_steps} step{'s' * (interval_steps != 1)}"
