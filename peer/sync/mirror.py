"""The observed-address service: it tells a peer its address as seen from here, this node's time, and what the line between them carries.

Answers are limited by budgets, and no answer is larger than its request. Whether a peer can be called from outside is tested elsewhere:
protocol/libp2p/dial_back.py.
"""

from __future__ import annotations

from collections.abc import Callable

from gossamer.peer.swarm.address_book import loop_s
from gossamer.protocol.addresses import network_of, route
from gossamer.protocol.budgets import Allowance, Budgets
from gossamer.protocol.errors import RefusalCode, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import ADDRESS_CHARS
from gossamer.protocol.messages.replies import Sighting

ECHOES_TO_ALL = Allowance(32 << 20, 600.0)  # bytes
ECHOES_TO_ONE = Allowance(2 << 20, 600.0)
INTRODUCTIONS_TO_ALL = Allowance(3000, 600.0)
INTRODUCTIONS_TO_ONE = Allowance(120, 600.0)  # a peer's anti-entropy asks a fourth as often
INTRODUCTIONS_TO_NETWORK = Allowance(600, 600.0)  # or through one relay: identities are free


class Mirror:
    """Answers peers about themselves, within budgets; one for all streams of a node. `now_s` returns Unix time."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._echoes = Budgets(loop_s, ECHOES_TO_ALL, ECHOES_TO_ONE)
        self._introductions = Budgets(loop_s, INTRODUCTIONS_TO_ALL, INTRODUCTIONS_TO_ONE, INTRODUCTIONS_TO_NETWORK)

    def sighting(self, observed: str) -> bytes:
        """Return a peer's address as its connection shows it, and the time here, encoded."""
        return Sighting(observed if len(observed) <= ADDRESS_CHARS else "", int(1000 * self._now_s())).to_bytes()

    def allow_echo(self, partner: PeerId, num_bytes: int) -> None:
        """Count an echo against the budgets. Raises Refused when they are used up."""
        if not self._echoes.take(num_bytes, partner):
            raise Refused(RefusalCode.BUSY, "I have echoed enough lately")

    def may_introduce(self, partner: PeerId, observed: str) -> bool:
        """Count a peer exchange against the budgets of the peer, its network and all; return False when one is used up."""
        is_near = not observed or route(observed) == "local"
        return self._introductions.take(1, partner, partner if is_near else network_of(observed))
