"""What others may ask of us about themselves: from where they come, what time it is here, and what the line between us carries.

Within budgets, and no answer is larger than what it answers. Whether others can call somebody is tried below: protocol/libp2p/dial_back.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from peer.swarm.address_book import loop_s
from protocol.addresses import network_of, route
from protocol.errors import RefusalCode, Refused
from protocol.identity import PeerId
from protocol.limits import ADDRESS_CHARS
from protocol.messages.sighting import Sighting

ECHO_BYTES = 2 << 20  # of one partner, in ECHO_REST_S
ALL_ECHO_BYTES = 32 << 20  # of all, in ECHO_REST_S
ECHO_REST_S = 600.0
INTRODUCTIONS = 120  # to one partner, in ECHO_REST_S: who keeps up asks four times as seldom (see upkeep.py)
NETWORK_INTRODUCTIONS = 600  # to all of one network, or through one relay's: keys cost nothing
ALL_INTRODUCTIONS = 3000
REMEMBERED = 4096


class Budget:
    """So much for each key, and so much for all, in a time; for the latest REMEMBERED keys."""

    def __init__(self, of_one: int, of_all: int, rest_s: float) -> None:
        self._of_one, self._of_all, self._rest_s = of_one, of_all, rest_s
        self._since_s = -rest_s
        self._taken: dict[Hashable, int] = {}

    def take(self, key: Hashable, amount: int, now_s: float) -> bool:
        """Take from the budget; False, and nothing taken, where it is used up."""
        if now_s - self._since_s >= self._rest_s:
            self._since_s, self._taken = now_s, {}
        is_left = self._taken.get(key, 0) + amount <= self._of_one and sum(self._taken.values()) + amount <= self._of_all
        if is_left and (key in self._taken or len(self._taken) < REMEMBERED):
            self._taken[key] = self._taken.get(key, 0) + amount
            return True
        return False


class Mirror:
    """Answers who asks about itself; one for all streams of a node. `now_s` is Unix time."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._echoes = Budget(ECHO_BYTES, ALL_ECHO_BYTES, ECHO_REST_S)
        self._introductions = Budget(INTRODUCTIONS, ALL_INTRODUCTIONS, ECHO_REST_S)
        self._of_networks = Budget(NETWORK_INTRODUCTIONS, ALL_INTRODUCTIONS, ECHO_REST_S)

    def sighting(self, observed: str) -> bytes:
        """Say from where somebody comes, as its connection shows, and what time it is here."""
        return Sighting(observed if len(observed) <= ADDRESS_CHARS else "", int(1000 * self._now_s())).to_bytes()

    def allow_echo(self, partner: PeerId, num_bytes: int) -> None:
        """Count an echo. Raises Refused where there have been enough of them lately."""
        if not self._echoes.take(partner, num_bytes, loop_s()):
            raise Refused(RefusalCode.BUSY, "I have echoed enough lately")

    def may_introduce(self, partner: PeerId, observed: str) -> bool:
        """Count an answer about who is there; False where there have been enough of them lately, to it or to its network."""
        is_near = not observed or route(observed) == "local"
        network = partner if is_near else network_of(observed)
        return self._introductions.take(partner, 1, loop_s()) and self._of_networks.take(network, 1, loop_s())
