"""The swarm's time of day: this machine's clock, corrected by what peers in different networks report.

The time is the median of one reading per network (the median of its Sybil groups) and our own clock. If all readings are of one network,
each counts. Of a Sybil group the last reading counts: identities are free, so a guest with many must not set the clocks of all others. A
single reading is used only if it comes from a bootstrap node and differs from our clock by more than the permitted skew. Only recent
readings count; a step of our clock, or a sleep of the machine, discards all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import CLOCK_SKEW_S
from gossamer.protocol.newest import keep_newest
from gossamer.protocol.tasks import loop_s

NETWORKS = 64  # whose readings are kept
GROUPS = 8  # of one network
LATELY_S = 900.0
SET_S = 2.0  # a larger drift between our clock and the loop's monotonic one counts as a step
WARN_S = 10.0  # an error that the operator is warned of
HELD_S = 1.0  # how long a result is cached without a new reading: every record of a full book needs it


@dataclass(frozen=True, slots=True)
class Reading:
    """The clock of one peer, which counts for its Sybil group."""

    ahead_s: float  # of this machine's clock, when it was read
    read_s: float  # loop time
    is_bootstrap: bool


@dataclass(slots=True)
class SwarmTime:
    """Unix time, for one event loop. `local_s` is this machine's clock."""

    local_s: Callable[[], float] = time.time
    _readings: dict[str, dict[PeerId | None, Reading]] = field(default_factory=dict)
    _since_s: float | None = None  # our clock minus the loop's
    _result_s: tuple[float, float] | None = None  # the cached `ahead_s`, and the loop time at which it expires

    def now_s(self) -> float:
        """Return the time of day: Unix time."""
        return self.local_s() + self.ahead_s

    def add_reading(self, network: str, group: PeerId | None, unix_s: float, *, is_bootstrap: bool = False) -> None:
        """Take in a reading: the time of day now at a peer in a network. `group`: the key of its Sybil group; None: it is unknown."""
        reading = Reading(unix_s - self.local_s(), loop_s(), is_bootstrap)
        self._forget_if_set()
        self._result_s = None
        groups = self._readings.get(network, {})
        keep_newest(groups, group, reading, GROUPS)
        keep_newest(self._readings, network, groups, NETWORKS)

    @property
    def ahead_s(self) -> float:
        """The correction that is added to this machine's clock."""
        self._forget_if_set()
        if self._result_s is None or loop_s() >= self._result_s[1]:
            self._result_s = self._median(), loop_s() + HELD_S
        return self._result_s[0]

    def _median(self) -> float:
        networks = self._networks()
        ahead_s = [statistics.median_low(reading.ahead_s for reading in readings) for readings in networks]
        if len(networks) == 1:
            ahead_s = [reading.ahead_s for reading in networks[0]]
        if len(ahead_s) == 1:
            (reading,) = networks[0]
            return reading.ahead_s if reading.is_bootstrap and abs(reading.ahead_s) > CLOCK_SKEW_S else 0.0
        return statistics.median_low([0.0, *ahead_s])

    @property
    def is_agreed(self) -> bool:
        """Whether most readings and our own clock agree with the result, so that another reading would hardly move it."""
        ahead_s = self.ahead_s
        clocks_s = [0.0, *(reading.ahead_s for readings in self._networks() for reading in readings)]
        return 2 * sum(abs(clock_s - ahead_s) <= CLOCK_SKEW_S for clock_s in clocks_s) > len(clocks_s)

    @property
    def warning(self) -> str:
        """A warning about this machine's clock; empty if the clock is right or unverified."""
        ahead_s, num = self.ahead_s, len(self._networks())
        if abs(ahead_s) < WARN_S:
            return ""
        side, networks = "behind" if ahead_s > 0 else "ahead of", f"peers in {num} networks" if num > 1 else "the peers that were asked"
        return f"this machine's clock is about {round(abs(ahead_s), -1):.0f} s {side} {networks}; theirs is used: set yours by network time"

    def _networks(self) -> list[list[Reading]]:
        """Return the recent readings by network."""
        after_s = loop_s() - LATELY_S
        lately = [[reading for reading in groups.values() if reading.read_s >= after_s] for groups in self._readings.values()]
        return [readings for readings in lately if readings]

    def _forget_if_set(self) -> None:
        """Discard all readings if our clock was set since, or the loop's clock stood still while the machine slept."""
        since_s = self.local_s() - loop_s()
        if self._since_s is not None and abs(since_s - self._since_s) > SET_S:
            self._readings.clear()
            self._result_s = None
        self._since_s = since_s
