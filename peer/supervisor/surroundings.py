"""Measurements for the pauses that settings require: use of the machine by other processes, battery, memory and disk of the peer,
heat, and the power of GPUs.

Commands (the operator's `pause_when`, the driver's tool for temperatures) run beside the supervisor, which never waits for them.

"Others" are all processes except this peer's: their processor time is that of the machine less the peer's. Keyboard activity and the use of
the GPU by others are not measured.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.energy import busy_cpu_s, cpu_s
from gossamer.peer.machine.room import held_bytes, size_of
from gossamer.peer.machine.units import UNLIMITED
from gossamer.peer.supervisor.gpu_driver import GPU_TOOL, GpuDriver, GpuReading
from gossamer.peer.supervisor.polled_command import PolledCommand

T = TypeVar("T")

MEASURE_S = 5.0  # between two readings
DISK_S = 30.0  # of the disk
LEAST_CORES = 0.5  # what others may use of a small machine before it counts as in use...
LEAST_SHARE = 0.1  # ...and of a large one, as a share of its cores
ASK_S = 60.0  # of the operator's command
HEAT_S = 10.0  # of temperatures that the system tells
COOLER_C = 5  # below the limit before a peer that was too hot trains again
SENSORS = ("amdgpu", "coretemp", "k10temp", "zenpower", "cpu_thermal")  # of GPUs and processors, among all sensors of a machine
CALM_S = 300.0  # how long they must have used less than that before it counts as idle again


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The last measurements."""

    is_on_battery: bool = False
    cores_of_others: float = 0.0  # processor cores that others used lately; 0 when the machine counts as idle
    held_bytes: int = 0  # memory of all the peer's processes
    home_bytes: int = 0  # on the disk
    too_hot: str = ""  # what is, in words
    gpus: tuple[GpuReading, ...] = ()  # as the driver tells
    says_pause: bool = False  # the operator's command


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
    """Measures the machine and the peer, only what the settings need, and at bounded intervals. `now_s`: a monotonic clock."""

    def __init__(self, home: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._idleness = Idleness(os.cpu_count() or 1)
        self._memory = CachedReading(MEASURE_S, lambda: held_bytes(os.getpid()))
        self._disk = CachedReading(DISK_S, lambda: size_of(home))
        self._heat = Thermometer()
        self._asked, self._question = PolledCommand(ASK_S), ""
        self.warnings = {"pause_when": "", "pause_above_temperature": "", "max_gpu_power": ""}

    def close(self) -> None:
        """End the commands that run."""
        self._heat.close()
        self._asked.close()

    def look(self, settings: LocalSettings) -> Surroundings:
        """Return the measurements that the settings need."""
        now_s = self._now_s()
        if not settings.only_idle:
            self._idleness = Idleness(os.cpu_count() or 1)
        elif self._idleness.is_due(now_s):
            self._idleness.read(now_s, others_cpu_s())
        return Surroundings(
            settings.not_on_battery and is_on_battery(),
            self._idleness.cores_of_others,
            self._memory.read(now_s) if settings.max_memory != UNLIMITED else 0,
            self._disk.read(now_s) if settings.max_disk != UNLIMITED else 0,
            self._too_hot(settings.pause_above_temperature, now_s),
            self._gpus(settings.max_gpu_power, now_s),
            self._says_pause(settings.pause_when, now_s),
        )

    def _too_hot(self, limit_c: int, now_s: float) -> str:
        words = self._heat.look(limit_c, now_s) if limit_c else ""
        unread = "pause_above_temperature has no effect: neither the GPU's driver nor this system tells a temperature"
        self.warnings["pause_above_temperature"] = unread if limit_c and self._heat.is_blind else ""
        return words

    def _gpus(self, most_watts: int, now_s: float) -> tuple[GpuReading, ...]:
        driver = self._heat.gpus
        if not most_watts and not driver.is_there:
            return ()
        found = driver.look(now_s)
        is_blind = bool(most_watts) and driver.has_answered and all(gpu.limit_watts is None for gpu in found)
        self.warnings["max_gpu_power"] = "max_gpu_power has no effect: no GPU's driver tells its power limit" if is_blind else ""
        return found

    def _says_pause(self, command: str, now_s: float) -> bool:
        if command != self._question:
            self._asked.close()
            self._asked, self._question = PolledCommand(ASK_S), command
        if command:
            self._asked.poll(shlex.split(command), now_s)
        code, failure = (self._asked.code, self._asked.failure) if command else (None, "")
        if not failure and code not in (None, 0, 1):
            failure = f"it exits with {code}"
        self.warnings["pause_when"] = f"pause_when has no effect: {failure}; 0 pauses, 1 trains" if failure else ""
        return not failure and code == 0


class CachedReading(Generic[T]):
    """A measurement that is repeated only after an interval."""

    def __init__(self, seconds: float, measure: Callable[[], T]) -> None:
        self._seconds = seconds
        self._measure = measure
        self._last: tuple[float, T] | None = None

    def read(self, now_s: float) -> T:
        """Return the last measurement."""
        if self._last is None or now_s - self._last[0] >= self._seconds:
            self._last = (now_s, self._measure())
        return self._last[1]


class Thermometer:
    """The hottest GPU or processor of the machine, as far as the driver or the system tells."""

    def __init__(self, sensors: Callable[[], float | None] | None = None, tool: Sequence[str] = GPU_TOOL) -> None:
        self._sensors = CachedReading(HEAT_S, sensors or hottest_sensor)
        self.gpus = GpuDriver(tool)
        self._was_too_hot = False
        self.is_blind = False  # nothing can be read

    def look(self, limit_c: int, now_s: float) -> str:
        """Return in words what is hotter than the limit; empty if nothing is. Once too hot, it must cool by COOLER_C."""
        hottest = max((gpu.degrees for gpu in self.gpus.look(now_s) if gpu.degrees is not None), default=None)
        readings = {"a GPU": hottest, "the machine": self._sensors.read(now_s)}
        known = {name: degrees for name, degrees in readings.items() if degrees is not None}
        self.is_blind = not known and self.gpus.has_answered
        name, degrees = max(known.items(), key=lambda item: item[1], default=("", 0.0))
        self._was_too_hot = degrees > limit_c - (COOLER_C if self._was_too_hot else 0)
        return f"{name} has {degrees:.0f} C" if self._was_too_hot else ""

    def close(self) -> None:
        """End the driver's tool."""
        self.gpus.close()


def hottest_sensor() -> float | None:
    """Return the highest temperature that the system tells of a GPU or processor, in degrees Celsius; None if it tells none."""
    found = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    return max((reading.current for name in SENSORS for reading in found.get(name, ())), default=None)


def others_cpu_s() -> float:
    """Return the processor seconds that all processes but this one and its descendants have used."""
    me = psutil.Process()
    return busy_cpu_s() - sum(cpu_s(process.pid) for process in (me, *me.children(recursive=True)))


def is_on_battery() -> bool:
    """Return whether the machine runs on battery now; False where that is unknown."""
    battery = psutil.sensors_battery()
    return battery is not None and battery.power_plugged is False
