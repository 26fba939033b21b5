"""Measurements for the pauses that settings require: use of the machine by other processes, battery, memory and disk of the peer.

Commands (the operator's `pause_when`, the driver's tool for temperatures) run beside the supervisor, which never waits for them.

"Others" are all processes except this peer's: their processor time is that of the machine less the peer's. Keyboard activity and the use of
the GPU by others are not measured.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, TypeVar

import psutil

from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.energy import busy_cpu_s, cpu_s
from gossamer.peer.machine.process_group import kill_group
from gossamer.peer.machine.room import held_bytes, size_of
from gossamer.peer.machine.units import UNLIMITED

T = TypeVar("T")

MEASURE_S = 5.0  # between two readings
DISK_S = 30.0  # of the disk
LEAST_CORES = 0.5  # what others may use of a small machine before it counts as in use...
LEAST_SHARE = 0.1  # ...and of a large one, as a share of its cores
ASK_S = 60.0  # of the operator's command
COMMAND_S = 30.0  # that a command may take
KILLED_S = 0.2  # that a killed command may take to end
MOST_OUTPUT_BYTES = 4096  # of a command that are read
HEAT_S = 10.0  # of temperatures
COOLER_C = 5  # below the limit before a peer that was too hot trains again
GPU_TOOL = ("nvidia-smi", "--query-gpu=temperature.gpu", "--format=csv,noheader,nounits")
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
    """Measures the machine and the peer, only what the settings need, and at bounded intervals."""

    def __init__(self, home: Path) -> None:
        self._idleness = Idleness(os.cpu_count() or 1)
        self._memory = CachedReading(MEASURE_S, lambda: held_bytes(os.getpid()))
        self._disk = CachedReading(DISK_S, lambda: size_of(home))
        self._heat = Thermometer()
        self._asked, self._question = PolledCommand(ASK_S), ""
        self.warnings = {"pause_when": "", "pause_above_temperature": ""}

    def close(self) -> None:
        """End the commands that run."""
        self._heat.close()
        self._asked.close()

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
            self._too_hot(settings.pause_above_temperature, now_s),
            self._says_pause(settings.pause_when, now_s),
        )

    def _too_hot(self, limit_c: int, now_s: float) -> str:
        words = self._heat.look(limit_c, now_s) if limit_c else ""
        unread = "pause_above_temperature has no effect: neither the GPU's driver nor this system tells a temperature"
        self.warnings["pause_above_temperature"] = unread if limit_c and self._heat.is_blind else ""
        return words

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


class PolledCommand:
    """A command that is run again and again, and never waited for. `code` and `output` are those of its last run."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None  # a file: a pipe would stay open as long as a child of the command does
        self._began_s = float("-inf")
        self.code: int | None = None  # None: it has not ended yet
        self.output = ""
        self.failure = ""  # why the last run has no code

    def poll(self, command: Sequence[str], now_s: float) -> None:
        """Start the command if it is due, and note its end. Call it often; `now_s` is a monotonic clock."""
        if self._process is not None and self._process.poll() is not None:
            assert self._printed is not None
            self._printed.seek(0)
            self._end(self._process.returncode, self._printed.read(MOST_OUTPUT_BYTES).decode(errors="replace"), "")
        elif self._process is not None and now_s - self._began_s > COMMAND_S:
            self.close()
            self._end(None, "", f"it took longer than {COMMAND_S:.0f} s")
        elif self._process is None and now_s - self._began_s >= self._every_s:
            self._began_s = now_s
            self._start(command)

    def _start(self, command: Sequence[str]) -> None:
        null = subprocess.DEVNULL
        try:
            self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end of the run)
            self._process = subprocess.Popen(command, stdin=null, stdout=self._printed, stderr=null, start_new_session=True)
        except (OSError, ValueError) as error:
            self._end(None, "", str(error))

    def _end(self, code: int | None, output: str, failure: str) -> None:
        self.code, self.output, self.failure, self._process = code, output, failure, None
        if self._printed is not None:
            self._printed.close()

    def close(self) -> None:
        """Kill it, with its children, if it runs."""
        if self._process is not None:
            kill_group(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a broken device cannot be killed
                self._process.wait(KILLED_S)
            self._end(None, "", "")


class Thermometer:
    """The hottest GPU or processor of the machine, as far as the driver or the system tells."""

    def __init__(self, sensors: Callable[[], float | None] | None = None, tool: Sequence[str] = GPU_TOOL) -> None:
        self._sensors = CachedReading(HEAT_S, sensors or hottest_sensor)
        self._tool, self._gpus = tool, PolledCommand(HEAT_S)
        self._was_too_hot = False
        self.is_blind = False  # nothing can be read

    def look(self, limit_c: int, now_s: float) -> str:
        """Return in words what is hotter than the limit; empty if nothing is. Once too hot, it must cool by COOLER_C."""
        self._gpus.poll(self._tool, now_s)
        readings = {"a GPU": hottest_in(self._gpus.output), "the machine": self._sensors.read(now_s)}
        known = {name: degrees for name, degrees in readings.items() if degrees is not None}
        self.is_blind = not known and (self._gpus.code is not None or bool(self._gpus.failure))
        name, degrees = max(known.items(), key=lambda item: item[1], default=("", 0.0))
        self._was_too_hot = degrees > limit_c - (COOLER_C if self._was_too_hot else 0)
        return f"{name} has {degrees:.0f} C" if self._was_too_hot else ""

    def close(self) -> None:
        """End the driver's tool."""
        self._gpus.close()


def hottest_in(text: str) -> float | None:
    """Return the highest of the numbers in a text, one a line; None if there is none."""
    return max((float(line) for line in text.split() if line.isdecimal()), default=None)


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
