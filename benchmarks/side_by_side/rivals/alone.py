"""No exchange at all: the floor, the time of the training itself."""

from __future__ import annotations

from benchmarks.side_by_side.training import Training


class Alone:
    """A peer that trains alone."""

    def __init__(self, training: Training) -> None:
        pass

    def after_step(self, own_steps: int) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
