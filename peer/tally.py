"""Counts of a process that begins at zero whenever it is restarted, added up over all its lives."""

from __future__ import annotations


class Tally:
    """Totals by name. Not thread-safe."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._now: dict[str, float] = {}

    def total(self, name: str, count: float) -> float:
        """Note that the present life has counted `count` so far, and return the total."""
        self._now[name] = count
        return self._before.get(name, 0) + count

    def begin_life(self) -> None:
        """The process was started again: what it says from now on comes on top."""
        for name, count in self._now.items():
            self._before[name] = self._before.get(name, 0) + count
        self._now.clear()
