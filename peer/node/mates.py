"""The other holders of our stage: one that leaves a stage leaves it to those that give its weights at that moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.sync.sources import Sources
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Contents
from gossamer.protocol.tasks import loop_s

ASKED = 8  # holders of a stage, at once
ANSWER_S = 10.0  # for them to answer
RANK_S = 25.0  # of two that may leave, the second one waits for so long: the record of the first one is seen by then


@dataclass(slots=True)
class Mates:
    """Ask the other holders of our stage for the header of their state. Belongs to one event loop. `sources` asks as one of them."""

    membership: Membership
    lifecycle: Lifecycle
    sources: Sources
    asked: Sequence[KnownPeer] = ()  # the last time
    answered: list[KnownPeer] = field(default_factory=list)  # of these: they gave our stage's weights
    _answered_s: dict[PeerId, float] = field(default_factory=dict)  # when each last did so; loop time

    @property
    def own_stage(self) -> int:
        """The stage that this peer holds, counted from one."""
        return self.membership.terms.own_stage

    def claims(self) -> list[KnownPeer]:
        """Return the live peers that claim our stage."""
        return self.sources.book.holders(self.own_stage, loop_s())

    async def ask(self, peers: Sequence[KnownPeer]) -> None:
        """Ask the first ASKED of these peers, and note which of them give the weights of our stage."""
        self.asked = peers[:ASKED]
        answers = await self.sources.ask_for_headers(self.asked, ANSWER_S)
        headers = [(entry, answer) for entry, answer in answers if isinstance(answer, Contents)]
        self.answered = [entry for entry, header in headers if header.total_bytes == self.membership.terms.state_bytes]
        since_s = loop_s() - RANK_S
        self._answered_s = {peer: at_s for peer, at_s in self._answered_s.items() if at_s >= since_s}
        self._answered_s |= {entry.peer_id: loop_s() for entry in self.answered}

    def rank(self) -> int:
        """Return our place, from 0, by id among those that gave our stage's weights lately: one that has just left is counted too."""
        return sum(peer < self.membership.identity.peer_id for peer in self._answered_s)

    async def leave_to(self, peers: Sequence[KnownPeer], stage: int, may_leave: Callable[[], bool]) -> bool:
        """Return whether we leave for another stage, counted from one, once these peers have been asked a last time.

        Meanwhile we give our stage's weights no longer, so of two that decide at the same moment, neither counts on the other.
        """
        self.lifecycle.hold(stage)
        await self.ask(peers)
        if may_leave():
            return True
        self.lifecycle.hold(self.own_stage)
        return False
