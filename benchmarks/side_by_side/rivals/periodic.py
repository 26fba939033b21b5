"""Systems that average all weights every n steps, and wait for the average."""

from __future__ import annotations

from abc import ABC, abstractmethod

from benchmarks.side_by_side.training import Training


class PeriodicAveraging(ABC):
    """Averages with `average` every `every_steps` inner steps, and once more at the end."""

    def __init__(self, training: Training) -> None:
        self.parameters = [parameter.data for parameter in training.model.parameters()]
        self._every_steps = training.seat.job.every_steps
        self._steps = self._averaged_at = 0

    @abstractmethod
    def average(self) -> None:
        """Replace the parameters' values by their mean over all peers."""

    def after_step(self, own_steps: int) -> None:
        """Average if it is due."""
        self._steps = own_steps
        if own_steps % self._every_steps == 0:
            self._average()

    def finish(self) -> None:
        """Average the steps since the last average."""
        if self._averaged_at < self._steps:
            self._average()

    def _average(self) -> None:
        self.average()
        self._averaged_at = self._steps
