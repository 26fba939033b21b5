"""Traffic of this peer in the current month, kept in its home across restarts."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime
from pathlib import Path

from gossamer.peer.machine.home import write_whole
from gossamer.peer.supervisor.rest import Rest, clock_text

SAVE_S = 30.0  # between two writes: a power cut forgets so much


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

    def count(self, total_bytes: int, now_s: float) -> None:
        """Count the traffic of the node since its start; a smaller number than before comes from a restarted node."""
        self.turn(now_s)
        self.num_bytes += total_bytes - self._seen if total_bytes >= self._seen else total_bytes
        self._seen = total_bytes
        if now_s - self._saved_s >= SAVE_S:
            self.save(now_s)

    def turn(self, now_s: float) -> None:
        """Reset the count in a new month."""
        if _month(now_s) != self._month:
            self._month, self.num_bytes = _month(now_s), 0

    def save(self, now_s: float) -> None:
        """Write the count to disk; a failing disk loses the count and nothing else."""
        self._saved_s = now_s
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps({"month": self._month, "bytes": self.num_bytes}).encode())

    def rest(self, limit: str, limit_bytes: float, now_s: float) -> Rest | None:
        """Return an offline pause if the month's traffic is used up: membership costs traffic too."""
        self.turn(now_s)
        if self.num_bytes < limit_bytes:
            return None
        until_s = _next_month_s(now_s)
        return Rest(
            f"this month's traffic of {limit} is used up, until {clock_text(until_s, now_s)}",
            "ends by itself then; `peer config monthly_traffic SIZE` allows more",
            until_s=until_s,
            is_offline=True,
        )


def _month(now_s: float) -> str:
    return datetime.fromtimestamp(now_s).strftime("%Y-%m")


def _next_month_s(now_s: float) -> float:
    local = datetime.fromtimestamp(now_s)
    year, month = divmod(local.year * 12 + local.month, 12)
    return datetime(year, month + 1, 1).timestamp()
