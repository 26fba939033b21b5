"""For how long a condition has held, and for what share of the time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gossamer.protocol.tasks import loop_s


@dataclass(slots=True)
class Lasting:
    """For how long a condition has held at each look. Belongs to one event loop."""

    since_s: float | None = None  # loop time

    def look(self, holds: bool) -> None:
        """Note whether it holds now."""
        self.since_s = (loop_s() if self.since_s is None else self.since_s) if holds else None

    @property
    def lasts_s(self) -> float:
        """For how long; 0 where it does not hold."""
        return 0.0 if self.since_s is None else loop_s() - self.since_s


class HeldShare:
    """In what share of the last looks a condition held."""

    def __init__(self, num_looks: int) -> None:
        self._looks: deque[bool] = deque(maxlen=num_looks)

    def look(self, holds: bool) -> None:
        """Note whether it holds now."""
        self._looks.append(holds)

    def clear(self) -> None:
        """Forget all looks."""
        self._looks.clear()

    @property
    def share(self) -> float:
        """The share; 0 before there were so many looks."""
        return sum(self._looks) / len(self._looks) if len(self._looks) == self._looks.maxlen else 0.0
