"""The training schedule: windows of the week in local time, like "22:00-07:00" or "mon-fri 22:00-07:00, sat 00:00-24:00".

A window that ends before it begins continues past midnight and belongs to the day on which it begins. Windows are in local time: a change
of the clocks makes a window of that night shorter or longer.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Final, Self

ALWAYS: Final = "always"
DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES: Final = 24 * 60
_LOOK_AHEAD_MINUTES: Final = 8 * _DAY_MINUTES
_WINDOW = re.compile(r"(?:([a-z]+)(?:-([a-z]+))?\s+)?(\d{1,2})[:.](\d\d)\s*-\s*(\d{1,2})[:.](\d\d)")


@dataclass(frozen=True, slots=True)
class Window:
    """A part of some days of the week; minutes after local midnight."""

    days: frozenset[int]  # Monday is 0; on which it begins
    begin: int
    end: int  # more than the minutes of a day if it continues past midnight

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read a window. Raises ValueError with the nearest valid form."""
        match = _WINDOW.fullmatch(text.strip().lower())
        if match is None:
            raise ValueError(f"{text.strip()!r} is no window; write it like 22:00-07:00, or mon-fri 22:00-07:00")
        first, last = (_day(name) if name else None for name in match.group(1, 2))
        begin, end = _minute(*match.group(3, 4)), _minute(*match.group(5, 6))
        if begin == end:
            raise ValueError(f"{text.strip()!r} is empty; did you mean 00:00-24:00?")
        days = range(7) if first is None else ((first + day) % 7 for day in range(((first if last is None else last) - first) % 7 + 1))
        return cls(frozenset(days), begin, end if end > begin else end + _DAY_MINUTES)

    def holds(self, local: datetime) -> bool:
        """Return whether a moment, in local time, lies in the window."""
        minute, day = local.hour * 60 + local.minute, local.weekday()
        today = day in self.days and self.begin <= minute < self.end
        return today or ((day - 1) % 7 in self.days and minute + _DAY_MINUTES < self.end)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Windows in which a peer may train; none means always. `zone`: whose local time, None for this machine's."""

    windows: tuple[Window, ...]
    zone: tzinfo | None = None

    @classmethod
    def from_text(cls, text: str, zone: tzinfo | None = None) -> Self:
        """Read windows that are separated by commas, or "always". Raises ValueError."""
        return cls(() if text.strip() == ALWAYS else tuple(map(Window.from_text, text.split(","))), zone)

    def allows(self, now_s: float) -> bool:
        """Return whether a moment (Unix seconds) lies in a window."""
        local = datetime.fromtimestamp(now_s, self.zone)
        return not self.windows or any(window.holds(local) for window in self.windows)

    @property
    def hours_a_day(self) -> float:
        """Return the mean hours of a day in the windows; overlapping ones count once."""
        if not self.windows:
            return 24.0
        minutes = {
            (day * _DAY_MINUTES + minute) % (7 * _DAY_MINUTES)
            for window in self.windows
            for day in window.days
            for minute in range(window.begin, window.end)
        }
        return len(minutes) / (7 * 60)

    def changes_s(self, now_s: float) -> float | None:
        """Return when the answer of `allows` changes next (Unix seconds); None for never."""
        minute = int(now_s // 60) + 1
        now = self.allows(now_s)
        return next((60.0 * later for later in range(minute, minute + _LOOK_AHEAD_MINUTES) if self.allows(60.0 * later) != now), None)


def _minute(hours: str, minutes: str) -> int:
    minute = int(hours) * 60 + int(minutes)
    if minute > _DAY_MINUTES or int(minutes) > 59:
        raise ValueError(f"there is no time {hours}:{minutes}; a day ends at 24:00")
    return minute


def _day(name: str) -> int:
    if name not in DAYS:
        near = difflib.get_close_matches(name, DAYS, n=1, cutoff=0.0)
        raise ValueError(f"there is no day {name!r}; did you mean {near[0]}?")
    return DAYS.index(name)
