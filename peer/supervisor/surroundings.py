"""Measurements for the pauses that settings require: use of the machine by other processes, battery, memory and disk of the peer.

"Others" are all processes except this peer's: their processor time is that of the machine less the peer's. Keyboard activity and the use of
the GPU by others are not measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.energy import busy_cpu_s, cpu_s
from gossamer.peer.machine.room import held_bytes, size_of
from gossamer.peer.machine.units import UNLIMITED

MEASURE_S = 5.0  # between two readings
DISK_S = 30.0  # of the disk
LEAST_CORES = 0.5  # what others may use of a small machine before it counts as in use...
LEAST_SHARE = 0.1  # ...and of a large one, as a share of its cores
CALM_S = 300.0  # how long they must have used less than that before it counts as idle again


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The last measurements."""

    is_on_battery: bool = False
    cores_of_others: float = 0.0  # processor cores that others used lately; 0 when the machine counts as idle
    held_bytes: int = 0  # memory of all the peer's processes
    home_bytes: int = 0  # on the disk


class Idleness:
    """Whether other processes use the machine, from readings of processor time. Pure; `now_s` is a monotonic clock."""

    def __init__(self, num_cores: int) -> None:
        self.allowed_cores = max(LEAST_CORES, LEAST_SHARE * num_cores)
        self.cores_of_others = 0.0  # as in Surroundings
        self._last: tuple[float, float] | None = None  # time of the last reading, and processor seconds of others until then
        self._busy_s: float | None = None  # when others last used more than the allowed cores

    def is_due(self, now_s: float) -> bool:
        """Return whether the last reading is old enough for another."""
        return self._last is None or now_s - self._last[0] >= MEASURE_S

    def read(self, now_s: float, others_cpu_s: float) -> None:
        """Add a reading: the processor time of others since the machine started."""
        last, self._last = self._last, (now_s, others_cpu_s)
        if last is None:
            return
        cores = (others_cpu_s - last[1]) / max(1e-9, now_s - last[0])
        if cores > self.allowed_cores:
            self._busy_s, self.cores_of_others = now_s, cores
        elif self._busy_s is not None and now_s - self._busy_s >= CALM_S:
            self._busy_s, self.cores_of_others = None, 0.0


class Lookout:
    """Measures the machine and the peer, only what the settings need, and at bounded intervals."""

    def __init__(self, home: Path) -> None:
        self._idleness = Idleness(os.cpu_count() or 1)
        self._memory = CachedReading(MEASURE_S, lambda: held_bytes(os.getpid()))
        self._disk = CachedReading(DISK_S, lambda: size_of(home))

    def look(self, settings: LocalSettings) -> Surroundings:
        """Return the measurements that the settings need."""
        now_s = time.monotonic()
        if not settings.only_idle:
            self._idleness = Idleness(os.cpu_count() or 1)
        elif self._idleness.is_due(now_s):
            self._idleness.read(now_s, others_cpu_s())
        return Surroundings(
            settings.not_on_battery and is_on_battery(),
            self._idleness.cores_of_others,
            self._memory.read(now_s) if settings.max_memory != UNLIMITED else 0,
            self._disk.read(now_s) if settings.max_disk != UNLIMITED else 0,
        )


class CachedReading:
    """A measurement that is repeated only after an interval."""

    def __init__(self, seconds: float, measure: Callable[[], int]) -> None:
        self._seconds = seconds
        self._measure = measure
        self._last: tuple[float, int] | None = None

    def read(self, now_s: float) -> int:
        """Return the last measurement."""
        if self._last is None or now_s - self._last[0] >= self._seconds:
            self._last = (now_s, self._measure())
        return self._last[1]


def others_cpu_s() -> float:
    """Return the processor seconds that all processes but this one and its descendants have used."""
    me = psutil.Process()
    return busy_cpu_s() - sum(cpu_s(process.pid) for process in (me, *me.children(recursive=True)))


def is_on_battery() -> bool:
    """Return whether the machine runs on battery now; False where that is unknown."""
    battery = psutil.sensors_battery()
    return battery is not None and battery.power_plugged is False
