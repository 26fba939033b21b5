"""Decide whether this peer pauses now: by request, schedule, machine state, or used-up traffic."""

from __future__ import annotations

import time

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.units import size_bytes
from gossamer.peer.supervisor.monthly_traffic import MonthlyTraffic
from gossamer.peer.supervisor.rest import Rest, memory_rest, ruled_rest
from gossamer.peer.supervisor.surroundings import Lookout


class Resting:
    """Polled about once a second. `asked` is a pause that only the operator ends."""

    def __init__(self, home: Home) -> None:
        self.asked: Rest | None = None
        self.month = MonthlyTraffic(home.traffic, time.time())
        self._lookout = Lookout(home.path)

    def wanted(self, config: PeerConfig) -> Rest | None:
        """Return the pause that applies now, or None."""
        now_s = time.time()
        if self.asked is not None and self.asked.until_s is not None and now_s >= self.asked.until_s:
            self.asked = None
        used_up = self.month.rest(config.monthly_traffic, size_bytes(config.monthly_traffic), now_s)
        if used_up is not None or not config.trains:
            return used_up
        around = self._lookout.look(config)
        self.asked = self.asked or memory_rest(config, around)
        return self.asked or ruled_rest(config, now_s, around)

    def count_traffic(self, total_bytes: int) -> int:
        """Count the traffic of the node since its start; return the bytes of this month."""
        self.month.count(total_bytes, time.time())
        return self.month.num_bytes

    def save(self) -> None:
        """Write the traffic count to disk."""
        self.month.save(time.time())
