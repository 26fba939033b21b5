"""Counts the bytes that this peer has sent and received over the network, including the directory and libp2p's own traffic.

Only p2pd uses the network. On Linux the count is what the system has read and written for p2pd, less what passed between p2pd and this
process; elsewhere it is what the streams have carried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import psutil

from gossamer.protocol.libp2p.splice import CarriedBytes


class CarryingDaemon(Protocol):
    """What is known of the daemon that carries our streams."""

    carried: CarriedBytes

    @property
    def daemon_pid(self) -> int:
        """Its process id, 0 while there is none."""


@dataclass(frozen=True, slots=True)
class _Reading:
    pid: int
    sent: int
    received: int


class NodeTraffic:
    """Counts what has passed since this process began, over all lives of the daemon."""

    def __init__(self, network: CarryingDaemon) -> None:
        self._network = network
        self._last = _Reading(0, 0, 0)
        self.sent = 0
        self.received = 0

    def look(self) -> None:
        """Bring the counts up to date."""
        last, now = self._last, self._read()
        self._last = now
        if last.pid == now.pid:
            self.sent += max(0, now.sent - last.sent)
            self.received += max(0, now.received - last.received)

    def _read(self) -> _Reading:
        carried, pid = self._network.carried, self._network.daemon_pid
        try:
            counters = psutil.Process(pid).io_counters() if pid else None
            return _Reading(pid, counters.write_chars - carried.received, counters.read_chars - carried.sent) if counters else self._last
        except psutil.Error:
            return self._last
        except AttributeError:  # a system that does not count them
            return _Reading(-1, carried.sent, carried.received)
