"""When a peer pauses, why, and what ends the pause: by request, schedule, machine state, or the traffic of this month."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gossamer.peer.machine.config import LocalSettings, PeerConfig
from gossamer.peer.machine.events import Event, GpuPowerRead, Warned
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.schedule import Schedule
from gossamer.peer.machine.states import RESUMES
from gossamer.peer.machine.status import Status
from gossamer.peer.machine.units import MAX_DURATION_S, bytes_text, size_bytes
from gossamer.peer.supervisor.surroundings import CALM_S, COOLER_C, Lookout, Surroundings
from gossamer.protocol.errors import BadSettings


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause: the trainer has ended, and the node starts no meetings."""

    reason: str
    way_out: str
    until_s: float | None = None  # Unix seconds at which one that was asked for ends; None: at `peer resume`
    is_offline: bool = False  # the node has ended too
    is_last: bool = False  # the peer leaves as soon as the trainer has saved
    is_limit: bool = False  # a limit is reached, or the trainer cannot start: the operator gets a notice


LAST_PAUSE = Pause(  # before a leave that waits for the meeting in progress
    "asked to leave; finishing the meeting in progress first",
    "ends when the meeting in progress is over and the trainer has saved",
    is_last=True,
)


def asked_pause(now_s: float, seconds: float | None) -> Pause:
    """Return the pause that the operator asks for; without a duration it lasts until `peer resume`."""
    if seconds is None:
        return Pause("paused by the operator", RESUMES)
    until_s = now_s + seconds
    return Pause(f"paused by the operator until {clock_text(until_s, now_s)}", f"{RESUMES}, or by itself then", until_s=until_s)


def memory_pause(settings: LocalSettings, around: Surroundings) -> Pause | None:
    """Return a pause if the peer exceeds max_memory. Only the operator ends it: the trainer would take as much memory again."""
    if around.held_bytes <= size_bytes(settings.max_memory):
        return None
    way_out = "ends with `peer resume`, after `peer config max_memory SIZE` has allowed more"
    return Pause(f"it held {bytes_text(around.held_bytes)} of memory, and may hold {settings.max_memory}", way_out, is_limit=True)


def refused_pause(why: str, hint: str) -> Pause:
    """Return the pause of a peer whose trainer cannot start with its current settings."""
    return Pause(f"the trainer cannot start: {why}", f"{RESUMES}, once that is mended" + (f" ({hint})" if hint else ""), is_limit=True)


def ruled_pause(settings: LocalSettings, now_s: float, around: Surroundings) -> Pause | None:
    """Return the pause that the settings require at this time (Unix seconds), or None."""
    schedule = Schedule.from_text(settings.schedule)
    if not schedule.allows(now_s):
        until_s = schedule.changes_s(now_s)
        until = f" until {clock_text(until_s, now_s)}" if until_s else ""
        way_out = "ends by itself then; `peer config schedule always` ends it now"
        return Pause(f"outside the hours of the schedule {settings.schedule}{until}", way_out)
    if settings.not_on_battery and around.is_on_battery:
        return Pause("the machine runs on battery", "ends when the machine is plugged in; `peer config not_on_battery false` ends it now")
    if around.home_bytes > size_bytes(settings.max_disk):
        way_out = "ends when the folder is smaller, or `peer config max_disk SIZE` allows more; its cache/ may be deleted"
        return Pause(
            f"its folder takes {bytes_text(around.home_bytes)} of the disk, and may take {settings.max_disk}", way_out, is_limit=True
        )
    if around.too_hot:
        limit_c = settings.pause_above_temperature
        cooler = f"ends when it has cooled to {limit_c - COOLER_C} C; `peer config pause_above_temperature 0` ends it now"
        return Pause(f"{around.too_hot}, more than {limit_c} C", cooler, is_limit=True)
    allowed_watts = max((gpu.limit_watts for gpu in around.gpus if gpu.limit_watts is not None), default=0.0)
    if settings.max_gpu_power and allowed_watts > settings.max_gpu_power:
        lower = f"ends when `nvidia-smi -pl {settings.max_gpu_power}` has lowered that, as root; `peer config max_gpu_power 0` ends it now"
        return Pause(f"a GPU may draw {allowed_watts:.0f} W, more than {settings.max_gpu_power} W", lower, is_limit=True)
    if around.says_pause:
        return Pause(
            f"the command `{settings.pause_when}` asks for it",
            "ends when that command exits with 1; `peer config pause_when ''` ends it now",
        )
    if settings.only_idle and around.cores_of_others:
        calm = (
            f"ends when other processes have left the machine idle for {CALM_S / 60:.0f} minutes; `peer config only_idle false` ends it now"
        )
        return Pause(f"other processes use the machine: {around.cores_of_others:.1f} of its processor cores", calm)
    return None


def clock_text(moment_s: float, now_s: float) -> str:
    """Write a moment (Unix seconds) in local time, with its day where that is not near."""
    is_near = moment_s - now_s < 20 * 3600
    return datetime.fromtimestamp(moment_s).strftime("%H:%M" if is_near else "%a %d %b, %H:%M")


class MonthlyTraffic:
    """The count of this month, by local time, from its record in a file. `now_s` is Unix time.

    The counts of other months are kept too: a machine that starts with a wrong clock has the right month's count once its clock is set.
    """

    def __init__(self, path: Path, now_s: float) -> None:
        self._month = _month(now_s)
        self._counts: dict[str, int] = {}  # bytes by month
        self._seen = 0  # of the node that runs now
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # none yet, or no use
            kept = json.loads(path.read_text())
            self._counts = {name: int(count) for name, count in (kept.get("others", {}) | {kept["month"]: kept["bytes"]}).items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of this month so far."""
        return self._counts.get(self._month, 0)

    def count(self, total_bytes: int, now_s: float) -> int:
        """Count the traffic of the node since its start, and return the month's; a smaller number than before means a restarted node."""
        self._month = _month(now_s)
        self._counts[self._month] = self.num_bytes + (total_bytes - self._seen if total_bytes >= self._seen else total_bytes)
        self._seen = total_bytes
        return self.num_bytes

    def record(self) -> dict[str, Any]:
        """Return the counts, JSON-able, as the file holds them."""
        others = {name: count for name, count in self._counts.items() if name != self._month}
        return {"month": self._month, "bytes": self.num_bytes, "others": others}

    def pause(self, limit: str, limit_bytes: float, now_s: float) -> Pause | None:
        """Return an offline pause if the month's traffic is used up: membership costs traffic too."""
        self._month = _month(now_s)
        if self.num_bytes < limit_bytes:
            return None
        local = datetime.fromtimestamp(now_s)
        year, month = divmod(local.year * 12 + local.month, 12)
        until_s = datetime(year, month + 1, 1).timestamp()  # of the next month
        reason = f"the traffic of this month, {limit}, is used up until {clock_text(until_s, now_s)}"
        return Pause(reason, "ends by itself then; `peer config monthly_traffic SIZE` allows more", is_offline=True, is_limit=True)


class Pauses:
    """Polled about once a second. `asked` is a pause that only the operator ends; `now_s`: a monotonic clock."""

    def __init__(self, home: Home, now_s: Callable[[], float] = time.monotonic) -> None:
        self.asked: Pause | None = None
        self.month = MonthlyTraffic(home.traffic, time.time())
        self._lookout = Lookout(home.path, now_s)
        self._around = Surroundings()

    def ask(self, seconds: object) -> None:
        """Pause for so many seconds, or, with None, until the operator resumes.

        Raises BadSettings for what is no duration, and while a leave waits for its meeting.
        """
        if not (seconds is None or (isinstance(seconds, int | float) and 0.0 <= seconds <= MAX_DURATION_S)):  # nor NaN
            raise BadSettings(f"{seconds!r} is not a duration", hint="give a number of seconds, at most a hundred years")
        if self.asked == LAST_PAUSE:
            raise BadSettings("this peer leaves as soon as its meeting is over", hint="`peer resume` first, to keep it running")
        self.asked = asked_pause(time.time(), seconds)

    def move(self, seconds: float) -> None:
        """Move the end of the pause that was asked for: the machine's clock was set by so much."""
        if self.asked is not None and self.asked.until_s is not None:
            now_s = time.time()
            self.asked = asked_pause(now_s, self.asked.until_s + seconds - now_s)

    def look(self, status: Status) -> Iterator[Event]:
        """Yield a warning for each setting whose measurement fails now, and its end; and the power of the GPUs, where it has changed."""
        for topic, words in self._lookout.warnings.items():
            if words != status.warned.get(topic, ""):
                yield Warned(topic, words)
        power = tuple((gpu.draw_watts, gpu.limit_watts) for gpu in self._around.gpus)
        if power != tuple((gpu["draw_watts"], gpu["limit_watts"]) for gpu in status.gpu_power):
            yield GpuPowerRead(power)

    def close(self) -> None:
        """End the commands that measure."""
        self._lookout.close()

    def current_pause(self, config: PeerConfig) -> Pause | None:
        """Return the pause that applies now, or None."""
        now_s = time.time()
        if self.asked is not None and self.asked.is_last:
            return self.asked  # also where the traffic is used up: the peer leaves, and has only to save
        if self.asked is not None and self.asked.until_s is not None and now_s >= self.asked.until_s:
            self.asked = None
        used_up = self.month.pause(config.monthly_traffic, size_bytes(config.monthly_traffic), now_s)
        if used_up is not None or not config.trains:
            return used_up
        around = self._around = self._lookout.look(config)
        self.asked = self.asked or memory_pause(config, around)
        return self.asked or ruled_pause(config, now_s, around)


def _month(now_s: float) -> str:
    return datetime.fromtimestamp(now_s).strftime("%Y-%m")
