"""Energy use of a peer: from the machine's counters if it has any, else estimated.

The counters cover the whole machine; a peer's part is its share of the processor time in the same interval. GPUs are not counted.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

MEASURED, ESTIMATED = "measured", "estimated"
CORE_WATTS = 8.0  # of one busy core: chosen, between a laptop's and a server's
RAPL, SUPPLIES = Path("/sys/class/powercap"), Path("/sys/class/power_supply")


def _read(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # only root may read it on newer kernels
        return None


def _covers_the_rest(zone: Path) -> bool:
    """Return whether a counter is that of a whole laptop, in which its packages are counted already."""
    with suppress(OSError):
        return (zone / "name").read_text().strip() == "psys"
    return False


class Packages:
    """The energy counters of the processor packages (Intel's and AMD's RAPL); each wraps to zero at its maximum."""

    def __init__(self, folder: Path = RAPL) -> None:
        zones = [zone for zone in sorted(folder.glob("*-rapl:*")) if zone.name.count(":") == 1]
        self._counters = [zone for zone in zones if not _covers_the_rest(zone)]
        self._last = self._read()

    def _read(self) -> list[float | None]:
        return [_read(zone / "energy_uj") for zone in self._counters]

    def joules(self) -> float | None:
        """Return the energy of the packages since the last call; None without readable counters."""
        before, self._last = self._last, self._read()
        used_uj = 0.0
        for zone, old, new in zip(self._counters, before, self._last, strict=True):
            if old is None or new is None:
                return None
            used_uj += new - old if new >= old else new - old + (_read(zone / "max_energy_range_uj") or 0.0)
        return used_uj / 1e6 if before else None


def battery_watts(folder: Path = SUPPLIES) -> float | None:
    """Return the power that the machine draws from its battery; None on mains or without a battery."""
    for supply in sorted(folder.glob("BAT*")):
        try:
            discharging = (supply / "status").read_text().strip() == "Discharging"
        except OSError:
            continue
        watts = _read(supply / "power_now")
        if discharging and watts is not None:
            return watts / 1e6
    return None


def cpu_s(pid: int) -> float:
    """Return the processor time of a process and of its children that have ended; 0 for one that is not there."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def busy_cpu_s() -> float:
    """Return the processor time that the whole machine has used since it was started."""
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted as user time too
    stolen_s = getattr(times, "steal", 0.0)  # by other machines on this host
    return float(sum(times) - idle_s - guest_s - stolen_s)


class EnergyMeter:
    """Sums up the energy of one peer."""

    def __init__(self, packages: Packages | None = None, supplies: Path = SUPPLIES) -> None:
        self._packages = packages or Packages()
        self._supplies = supplies
        self._busy_s, self._own_s = busy_cpu_s(), 0.0
        self.watt_hours = 0.0
        self.how = ""

    def look(self, own_cpu_s: float, passed_s: float) -> None:
        """Add the energy of the `passed_s` since the last call; `own_cpu_s` is the peer's processor time since it was started."""
        busy_s, before_s, own_s = busy_cpu_s(), self._busy_s, max(0.0, own_cpu_s - self._own_s)
        self._busy_s, self._own_s = busy_s, own_cpu_s
        whole = self._packages.joules()
        if whole is None and (watts := battery_watts(self._supplies)) is not None:
            whole = watts * passed_s
        share = min(1.0, own_s / max(busy_s - before_s, own_s, 1e-9))
        self.watt_hours += (own_s * CORE_WATTS if whole is None else whole * share) / 3600
        self.how = ESTIMATED if whole is None or self.how == ESTIMATED else MEASURED  # a sum with one estimated part is an estimate
