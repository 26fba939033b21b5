"""What a run costs its member in a day and in a month: bytes, hours, watt-hours; the same words in `peer join`, `host` and `doctor`.

The bytes come from the interval between meetings (peer/trainer/interval.py), which holds the one count of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.energy import CORE_WATTS
from gossamer.peer.machine.schedule import Schedule
from gossamer.peer.machine.units import bytes_text, steps_text

STEP_S: Final = 1.0  # assumed duration of an inner step before any is measured
DAYS: Final = 30  # of a month
EMITTED_CHANGE: Final = 0.25  # relative change of the expected traffic from which on it is emitted again
SAID_FACTOR: Final = 2  # by which the cost must change to be said to the operator again


@dataclass(frozen=True, slots=True)
class Bill:
    """What a peer is expected to use."""

    day_bytes: float  # sent in a day of training; as many are received
    interval_steps: int  # between two meetings of a fragment
    step_s: float
    is_measured: bool  # whether the duration of a step is; else it is assumed
    hours: float  # of training in a day, by the schedule
    num_cores: int  # that train

    @property
    def month_bytes(self) -> float:
        """Bytes sent and received in a month."""
        return 2 * DAYS * self.day_bytes * self.hours / 24

    @property
    def day_watt_hours(self) -> float:
        """Estimated energy of the processors in a day; GPUs are not counted."""
        return self.num_cores * CORE_WATTS * self.hours

    def sentence(self) -> str:
        """Return the bill in words."""
        each_way = self.day_bytes * self.hours / 24
        measured = "measured" if self.is_measured else "assumed"
        return (
            f"about {bytes_text(each_way)} a day up and as much down, {bytes_text(self.month_bytes)} a month, by meetings every "
            f"{steps_text(self.interval_steps)} of {self.step_s:.2g} s ({measured}); {self.hours:.3g} hours a day, "
            f"{self.day_watt_hours / 1000:.2g} kWh ({self.num_cores} cores, estimated)"
        )


def bill(day_bytes: float, interval_steps: int, step_s: float, config: LocalSettings, *, is_measured: bool) -> Bill:
    """Return the bill of a peer with these settings."""
    cores = config.threads or os.cpu_count() or 1
    return Bill(day_bytes, interval_steps, step_s, is_measured, Schedule.from_text(config.schedule).hours_a_day, cores)
