"""Periodic work of the supervisor: energy, disk space, log rotation, and the status record.

The record, `status.json`, shows the last status of a peer that has ended, and is the base of the next start's totals.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator

from gossamer.peer.machine.energy import EnergyMeter
from gossamer.peer.machine.events import EnergyUsed, Event, Warned
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.log_lines import keep_short
from gossamer.peer.machine.status import AT_THE_END, OVER_ALL_STARTS, Status
from gossamer.peer.machine.units import bytes_text
from gossamer.peer.supervisor.clock_watch import ClockWatch

LOOK_S = 30.0
LITTLE_DISK_BYTES = 1 << 30  # what a few checkpoints of a middling model need


class Housekeeping:
    """Acts at most every LOOK_S; call `look` more often than that."""

    def __init__(self, home: Home, now_s: Callable[[], float] = time.monotonic) -> None:
        self._home = home
        self._now_s = now_s
        self._energy = EnergyMeter()
        self._looked_s = now_s()
        self._clock = ClockWatch()

    def look(self, status: Status) -> Iterator[Event]:
        """Yield an event if the machine's clock was set; the others if LOOK_S has passed since the last ones."""
        yield from self._clock.look()
        passed_s = self._now_s() - self._looked_s
        if passed_s >= LOOK_S:
            self._looked_s += passed_s
            self._energy.look(sum(status.processor_seconds.values()), passed_s)
            yield EnergyUsed(round(self._energy.watt_hours, 3), self._energy.how)
            yield from self._check_disk(status)
            self.keep(status)
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

    def keep(self, status: Status) -> None:
        """Write the record; a failing disk loses the record and nothing else."""
        with contextlib.suppress(OSError):
            write_whole(self._home.status, json.dumps(status.to_json()).encode(), is_synced=False)


def earlier(home: Home) -> dict[str, float]:
    """Return the totals of all earlier starts, and what the last one has reached; empty if the record is missing or unreadable."""
    try:
        last = home.last_status()
        totals = {name: float(last["lifetime"][name]) for name in ("joined", *OVER_ALL_STARTS)}
        return totals | {name: float(int(last[name])) for name in AT_THE_END}
    except (ValueError, KeyError, TypeError, OverflowError):
        return {}
