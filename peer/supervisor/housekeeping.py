"""Periodic work of the supervisor: energy, disk space, log rotation, and the records in the home, of which this is the only writer.

Of these, `status.json` shows the last status of a peer that has ended, and is the base of the next start's totals.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gossamer.peer.machine.energy import EnergyMeter
from gossamer.peer.machine.events import EnergyUsed, Event, Warned
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.log_lines import keep_short
from gossamer.peer.machine.status import AT_THE_END, OVER_ALL_STARTS, Status
from gossamer.peer.machine.units import bytes_text

LOOK_S = 30.0
LITTLE_DISK_BYTES = 1 << 30  # what a few checkpoints of a middling model need


class Housekeeping:
    """Acts at most every LOOK_S; call `look` more often than that. `records` returns what is to be kept, JSON-able, by file."""

    def __init__(self, home: Home, records: Callable[[], Mapping[Path, object]], now_s: Callable[[], float] = time.monotonic) -> None:
        self._home = home
        self._records = records
        self._now_s = now_s
        self._energy = EnergyMeter()
        self._looked_s = now_s()

    def look(self, status: Status) -> Iterator[Event]:
        """Yield the events that are due, if LOOK_S has passed since the last ones."""
        passed_s = self._now_s() - self._looked_s
        if passed_s >= LOOK_S:
            self._looked_s += passed_s
            self._energy.look(sum(status.processor_seconds.values()), passed_s)
            yield EnergyUsed(round(self._energy.watt_hours, 3), self._energy.how)
            yield from self._check_disk(status)
            self.keep()
            with contextlib.suppress(OSError):  # a full disk
                keep_short(self._home.log)

    def _check_disk(self, status: Status) -> Iterator[Event]:
        try:
            free_bytes = shutil.disk_usage(self._home.path).free
        except OSError:
            return
        free = bytes_text(1 << free_bytes.bit_length())  # the next power of two: another warning when half of it is left
        words = f"the disk of {self._home.path} is nearly full: less than {free} are free" if free_bytes < LITTLE_DISK_BYTES else ""
        if words != status.warned.get("disk", ""):
            yield Warned("disk", words)

    def keep(self) -> None:
        """Write the records; a failing disk loses them and nothing else."""
        for file, record in self._records().items():
            is_limit = file == self._home.traffic  # of the month: a power cut must not forget what has been used
            with contextlib.suppress(OSError):
                write_whole(file, json.dumps(record).encode(), is_synced=is_limit)


def earlier(home: Home) -> dict[str, float]:
    """Return the totals of all earlier starts, and what the last one has reached; empty if the record is missing or unreadable."""
    try:
        last = home.last_status()
        totals = {name: float(last["lifetime"][name]) for name in ("joined", *OVER_ALL_STARTS)}
        return totals | {name: float(int(last[name])) for name in AT_THE_END}
    except (ValueError, KeyError, TypeError, OverflowError):
        return {}
