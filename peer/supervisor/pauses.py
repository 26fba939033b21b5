"""Decide whether this peer pauses now: by request, schedule, machine state, or the traffic of this month."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import datetime
from pathlib import Path

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.units import size_bytes
from gossamer.peer.supervisor.pause import Pause, clock_text, memory_pause, ruled_pause
from gossamer.peer.supervisor.surroundings import Lookout

SAVE_S = 30.0  # between two writes of the traffic: a power cut loses this much


class MonthlyTraffic:
    """The count of one month, by local time. `now_s` is Unix time."""

    def __init__(self, path: Path, now_s: float) -> None:
        self._path = path
        self._month, self.num_bytes = _month(now_s), 0
        self._seen = 0  # of the node that runs now
        self._saved_s = now_s
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or no use
            kept = json.loads(path.read_text())
            if kept["month"] == self._month:
                self.num_bytes = int(kept["bytes"])

    def count(self, total_bytes: int, now_s: float) -> int:
        """Count the traffic of the node since its start, and return the month's; a smaller number than before means a restarted node."""
        self.reset_in_new_month(now_s)
        self.num_bytes += total_bytes - self._seen if total_bytes >= self._seen else total_bytes
        self._seen = total_bytes
        if now_s - self._saved_s >= SAVE_S:
            self.save(now_s)
        return self.num_bytes

    def reset_in_new_month(self, now_s: float) -> None:
        """Reset the count in a new month."""
        if _month(now_s) != self._month:
            self._month, self.num_bytes = _month(now_s), 0

    def save(self, now_s: float) -> None:
        """Write the count to disk; a failing disk loses the count and nothing else."""
        self._saved_s = now_s
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps({"month": self._month, "bytes": self.num_bytes}).encode())

    def pause(self, limit: str, limit_bytes: float, now_s: float) -> Pause | None:
        """Return an offline pause if the month's traffic is used up: membership costs traffic too."""
        self.reset_in_new_month(now_s)
        if self.num_bytes < limit_bytes:
            return None
        until_s = _next_month_s(now_s)
        return Pause(
            f"this month's traffic of {limit} is used up, until {clock_text(until_s, now_s)}",
            "ends by itself then; `peer config monthly_traffic SIZE` allows more",
            until_s=until_s,
            is_offline=True,
        )


class Pauses:
    """Polled about once a second. `asked` is a pause that only the operator ends."""

    def __init__(self, home: Home) -> None:
        self.asked: Pause | None = None
        self.month = MonthlyTraffic(home.traffic, time.time())
        self._lookout = Lookout(home.path)

    def current_pause(self, config: PeerConfig) -> Pause | None:
        """Return the pause that applies now, or None."""
        now_s = time.time()
        if self.asked is not None and self.asked.until_s is not None and now_s >= self.asked.until_s:
            self.asked = None
        used_up = self.month.pause(config.monthly_traffic, size_bytes(config.monthly_traffic), now_s)
        if used_up is not None or not config.trains:
            return used_up
        around = self._lookout.look(config)
        self.asked = self.asked or memory_pause(config, around)
        return self.asked or ruled_pause(config, now_s, around)


def _month(now_s: float) -> str:
    return datetime.fromtimestamp(now_s).strftime("%Y-%m")


def _next_month_s(now_s: float) -> float:
    local = datetime.fromtimestamp(now_s)
    year, month = divmod(local.year * 12 + local.month, 12)
    return datetime(year, month + 1, 1).timestamp()
