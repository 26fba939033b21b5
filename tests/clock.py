from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Clock:
    """A clock that a test sets."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
