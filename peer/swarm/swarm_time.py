"""What time it is: by this machine's clock, set right by what partners in different networks say.

Records are in force between absolute times, so a peer whose clock is an hour wrong would believe nobody, and nobody would believe it. Each
network has one voice, the median of its peers', and our own clock has one; the median of the voices holds. Where all whom we have heard
are in one network, each of them has a voice. A single peer is followed only if it is a door of the run, whom a newcomer has to believe, and
where not both can be meant.

Only what partners have said lately counts, and nothing from before our clock was set, or the machine slept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from gossamer.peer.swarm.address_book import loop_s
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import CLOCK_SKEW_S
from gossamer.protocol.newest import keep_newest

NETWORKS = 64  # whose voices are kept
PEERS = 8  # of one network
LATELY_S = 900.0
SET_S = 2.0  # by so much our clock goes on its own way against the machine's uptime before it counts as set
SAY_S = 10.0  # an error that is worth a word
HELD_S = 1.0  # what was reckoned holds so long where nothing new is heard: each record in a full book asks


@dataclass(frozen=True, slots=True)
class Voice:
    """What one peer said."""

    ahead_s: float  # of this machine's clock
    heard_s: float  # loop time
    is_door: bool


class SwarmTime:
    """Unix time, for one event loop. `local_s` is this machine's clock."""

    def __init__(self, local_s: Callable[[], float] = time.time) -> None:
        self.local_s = local_s
        self._voices: dict[str, dict[PeerId, Voice]] = {}
        self._since_s: float | None = None  # Unix time at the loop's zero, by our clock
        self._reckoned_s: tuple[float, float] | None = None  # what `ahead_s` is, and until which loop time

    def now_s(self) -> float:
        """Return what time it is."""
        return self.local_s() + self.ahead_s

    def heard(self, network: str, peer: PeerId, unix_s: float, *, is_door: bool = False) -> None:
        """Take in what time it is just now at a peer in a network."""
        voice = Voice(unix_s - self.local_s(), loop_s(), is_door)
        self._forget_if_set()
        self._reckoned_s = None
        peers = self._voices.get(network, {})
        keep_newest(peers, peer, voice, PEERS)
        keep_newest(self._voices, network, peers, NETWORKS)

    @property
    def ahead_s(self) -> float:
        """By how much this machine's clock is behind: what is to be added to it."""
        self._forget_if_set()
        if self._reckoned_s is None or loop_s() >= self._reckoned_s[1]:
            self._reckoned_s = self._reckon(), loop_s() + HELD_S
        return self._reckoned_s[0]

    def _reckon(self) -> float:
        networks = self._networks()
        voices = [statistics.median_low(voice.ahead_s for voice in peers) for peers in networks]
        if len(networks) == 1:
            voices = [voice.ahead_s for voice in networks[0]]
        if len(voices) == 1:
            (voice,) = networks[0]
            return voice.ahead_s if voice.is_door and abs(voice.ahead_s) > CLOCK_SKEW_S else 0.0
        return statistics.median_low([0.0, *voices])

    @property
    def is_settled(self) -> bool:
        """Whether most of the clocks that were heard, and ours, tell the time that holds: another voice would hardly move it."""
        ahead_s = self.ahead_s
        clocks_s = [0.0, *(voice.ahead_s for peers in self._networks() for voice in peers)]
        return 2 * sum(abs(clock_s - ahead_s) <= CLOCK_SKEW_S for clock_s in clocks_s) > len(clocks_s)

    @property
    def warning(self) -> str:
        """What the operator should know of this machine's clock; empty where it is right, or nobody can say."""
        ahead_s, num = self.ahead_s, len(self._networks())
        if abs(ahead_s) < SAY_S:
            return ""
        side, networks = "behind" if ahead_s > 0 else "ahead of", f"peers in {num} networks" if num > 1 else "the peers that were asked"
        return f"this machine's clock is about {abs(ahead_s):.0f} s {side} {networks}; theirs is used: set yours by network time"

    def _networks(self) -> list[list[Voice]]:
        """Return what was heard lately, by network."""
        after_s = loop_s() - LATELY_S
        lately = [[voice for voice in peers.values() if voice.heard_s >= after_s] for peers in self._voices.values()]
        return [voices for voices in lately if voices]

    def _forget_if_set(self) -> None:
        """Forget what was heard by another clock: ours was set, or the loop's has stood still while the machine slept."""
        since_s = self.local_s() - loop_s()
        if self._since_s is not None and abs(since_s - self._since_s) > SET_S:
            self._voices.clear()
            self._reckoned_s = None
        self._since_s = since_s
