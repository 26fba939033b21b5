"""When a staged run is over for a holder, by the holders of the neighbouring stages. docs/concepts/stages.md has the rules.

Only holders that have carried hops with us count: no stranger ends a run, or holds its end up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gossamer.peer.node.lasting import Lasting
from gossamer.peer.pipeline.carrier import Carrier
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.protocol.limits import RECORD_LIFETIME_S
from gossamer.protocol.messages.terms import BATCHES_AWAY
from gossamer.protocol.tasks import loop_s

OVER_S = 60.0  # all holders of a neighbouring stage must have ended for so long: a restarted one is back by then
NEAR_OVER_S = 2.0  # likewise in the last NEAR_SHARE-th of the run
NEAR_SHARE = 10
END_WAIT_S = 600.0  # at the end of the run a stage serves the lower one for so long, or for longer if steps are long
GONE_S = 60.0  # between the last sign of a holder that answers no call and signs of others: a restarted one is back by then
GONE_CALLS = 2  # that fail in a row
OVER_SHARE = 2  # before a half of the run, nobody can have come to its end


@dataclass(slots=True)
class StageEnd:
    """Tell whether the run is over for us. `look` while this peer trains, `pause` while it does not. Belongs to one event loop."""

    carrier: Carrier
    book: AddressBook
    groups: SybilGroups
    total_steps: int
    max_gap_steps: int  # between the global steps of two partners
    _over: Lasting = field(default_factory=Lasting)  # all holders of a neighbouring stage have ended
    _serving: Lasting = field(default_factory=Lasting)  # the lower stage is at its last steps, which ours waits for
    _stepped_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))  # when our step grew last; loop time without pauses

    @property
    def _own_stage(self) -> int:
        """Our stage, counted from one, as all stages here."""
        return self.carrier.stage.stage + 1

    def note_step(self) -> None:
        """Note that our global step has grown."""
        self._stepped_s.append(loop_s())

    def pause(self, seconds: float) -> None:
        """Note a time without training. It ends all waits, and makes no step long."""
        self._stepped_s = deque((at_s + seconds for at_s in self._stepped_s), self._stepped_s.maxlen)
        self._over, self._serving = Lasting(), Lasting()

    def look(self, global_step: int) -> bool:
        """Return whether the run is over: nobody of a neighbouring stage carries hops with us, and all its holders have ended.

        A stage after the first makes no last step of its own. It serves the lower stage until that has ended, for END_WAIT_S or the time of
        eight steps at most.
        """
        left_steps = self.total_steps - global_step
        is_near = NEAR_SHARE * left_steps <= self.total_steps
        ended = any(self._has_ended(stage, is_near=is_near) for stage in self._stages_apart())
        self._over.look(ended and OVER_SHARE * global_step >= self.total_steps)
        self._serving.look(not self.carrier.stage.is_first and self._serves_the_last(left_steps))
        wait_s = max(END_WAIT_S, 2 * (self._stepped_s[-1] - self._stepped_s[0]) if self._stepped_s else 0.0)
        return self._over.lasts_s >= (NEAR_OVER_S if is_near else OVER_S) or self._serving.lasts_s >= wait_s

    def _stages_apart(self) -> list[int]:
        """Return the neighbouring stages of which nobody carries hops with us."""
        carrier, own = self.carrier, self._own_stage
        is_served = any(lane.is_active(loop_s()) for lane in carrier.up.values())
        higher = [] if carrier.is_complete else [own + 1]
        return higher if carrier.stage.is_first or is_served else [*higher, own - 1]

    def _serves_the_last(self, left_steps: int) -> bool:
        """Return whether the lower stage is at its last steps, or half of its groups have ended near our own step: one alone may lie."""
        if left_steps <= 1 + BATCHES_AWAY:
            return True
        there = {entry.peer_id for entry in self.book.seen_lately(loop_s())}
        voters = [entry for entry in self.book.carriers(self._own_stage - 1) if entry.finished or entry.peer_id in there]
        return left_steps <= self.max_gap_steps and self.groups.half_agree(voters, lambda entry: entry.finished)

    def _has_ended(self, stage: int, *, is_near: bool) -> bool:
        """Return whether a holder of a stage that has carried hops with us has ended the run, and none that is there or away has not.

        Near the end a holder that is gone is waited for no longer.
        """
        left = [entry for entry in self.book.claimed(stage, loop_s()) if entry.has_carried and not (is_near and self._is_gone(entry))]
        return any(entry.finished for entry in self.book.carriers(stage)) and all(entry.finished for entry in left)

    def _is_gone(self, entry: KnownPeer) -> bool:
        """Return whether a peer answers no call and renews its record no longer, while others show that our own line works.

        Without others nobody can tell a dead peer from a line that is down: then only the lifetime of its record counts.
        """
        if loop_s() - entry.seen_s >= RECORD_LIFETIME_S:
            return True
        heard_s = max(other.seen_s for other in self.book.seen_lately(loop_s()))
        return entry.failures >= GONE_CALLS and heard_s - entry.seen_s >= GONE_S
