"""When a peer pauses, why, and what ends the pause. Pure functions: time and measurements are arguments."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.room import megabytes
from gossamer.peer.machine.schedule import Schedule
from gossamer.peer.machine.units import size_bytes
from gossamer.peer.supervisor.surroundings import CALM_S, Surroundings

RESUMES = "ends with `peer resume`"


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause: the trainer has ended, and the node starts no meetings."""

    reason: str
    way_out: str
    until_s: float | None = None  # Unix seconds; None: nobody knows
    is_offline: bool = False  # the node has ended too
    is_last: bool = False  # the peer leaves as soon as the trainer has saved


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
    return Pause(f"it held {megabytes(around.held_bytes)} of memory, and may hold {settings.max_memory}", way_out)


def refused_pause(why: str, hint: str) -> Pause:
    """Return the pause of a peer whose trainer cannot start with its current settings."""
    return Pause(f"the trainer cannot start: {why}", f"{RESUMES}, once that is mended" + (f" ({hint})" if hint else ""))


def last_pause() -> Pause:
    """Return the pause before a leave that waits for the meeting in progress."""
    return Pause(
        "asked to leave; finishing the meeting in progress first",
        "ends when the meeting in progress is over and the trainer has saved",
        is_last=True,
    )


def ruled_pause(settings: LocalSettings, now_s: float, around: Surroundings) -> Pause | None:
    """Return the pause that the settings require at this time (Unix seconds), or None."""
    schedule = Schedule.from_text(settings.schedule)
    if not schedule.allows(now_s):
        until_s = schedule.changes_s(now_s)
        until = f" until {clock_text(until_s, now_s)}" if until_s else ""
        way_out = "ends by itself then; `peer config schedule always` ends it now"
        return Pause(f"the schedule {settings.schedule} says so{until}", way_out, until_s=until_s)
    if settings.not_on_battery and around.is_on_battery:
        return Pause("the machine runs on battery", "ends when the machine is plugged in; `peer config not_on_battery false` ends it now")
    if around.home_bytes > size_bytes(settings.max_disk):
        way_out = "ends when the folder is smaller, or `peer config max_disk SIZE` allows more; its cache/ may be deleted"
        return Pause(f"its folder takes {megabytes(around.home_bytes)} of the disk, and may take {settings.max_disk}", way_out)
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
