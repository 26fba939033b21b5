"""What a run costs its member in a day and in a month: bytes, hours, watt-hours; the same words in `peer join`, `host` and `doctor`.

The bytes come from the interval between meetings (peer/trainer/interval.py), which holds the one count of them.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Final

from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.energy import CORE_WATTS
from gossamer.peer.machine.events import TrafficExpected
from gossamer.peer.machine.schedule import Schedule
from gossamer.peer.machine.units import bytes_text, percent_text, steps_text

STEP_S: Final = 1.0  # assumed duration of an inner step before any is measured
DAYS: Final = 30  # of a month
EMITTED_CHANGE: Final = 0.25  # relative change of the expected traffic from which on it is emitted again
SAID_FACTOR: Final = 2  # by which the cost must change to be said to the operator again


@dataclass(frozen=True, slots=True)
class Bill:
    """What a peer is expected to use."""

    day_bytes: float  # sent in a day of training
    day_received: float  # received in a day of training
    day_hops: float  # of day_bytes, by micro-batches that pass through the stages of a run
    interval_steps: int  # between two meetings of a fragment
    step_s: float
    is_measured: bool  # whether the duration of a step is; else it is assumed
    hours: float  # of training in a day, by the schedule
    num_cores: int  # that train

    @property
    def month_bytes(self) -> float:
        """Bytes sent and received in a month."""
        return DAYS * (self.day_bytes + self.day_received) * self.hours / 24

    @property
    def day_watt_hours(self) -> float:
        """Estimated energy of the processors in a day; GPUs are not counted."""
        return self.num_cores * CORE_WATTS * self.hours

    def days_of(self, num_bytes: float) -> float:
        """Return after how many days of a month so many bytes are used up; at most a month."""
        return min(float(DAYS), DAYS * num_bytes / max(1.0, self.month_bytes))

    def sentence(self) -> str:
        """Return the bill in words."""
        up, down = (bytes_text(num_bytes * self.hours / 24) for num_bytes in (self.day_bytes, self.day_received))
        measured = "measured" if self.is_measured else "assumed"
        share = f"{percent_text(self.day_hops / self.day_bytes)} of it by micro-batches, the rest " if self.day_hops else ""
        return (
            f"about {up} a day up and {'as much' if up == down else down} down, {bytes_text(self.month_bytes)} a month, {share}by meetings "
            f"every {steps_text(self.interval_steps)} of {self.step_s:.2g} s ({measured}); {self.hours:.3g} hours a day, "
            f"{self.day_watt_hours / 1000:.2g} kWh ({self.num_cores} core{'s' * (self.num_cores > 1)}, estimated)"
        )


def bill(expected: TrafficExpected, config: LocalSettings) -> Bill:
    """Return the bill of a peer with these settings."""
    cores = config.threads or os.cpu_count() or 1
    hours = Schedule.from_text(config.schedule).hours_a_day
    received = expected.day_bytes if math.isnan(expected.day_received) else expected.day_received
    steps = expected.inner_steps, expected.step_s
    return Bill(expected.day_bytes, received, expected.day_hops, *steps, expected.is_measured, hours, cores)
