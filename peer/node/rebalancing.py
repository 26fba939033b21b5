"""When a holder leaves a stage that has more holders than it needs for the stage that has the fewest.

A stage with one holder limits the whole run: four holders of another stage then wait most of the time. There is no coordinator that assigns
stages, so each holder decides for itself whether to move. Claims of other members alone move no holder:

- it has measured that its trainer waits for work;
- the holders that stay have met it and give the stage's weights now, and they are more Sybil groups than claim the other stage. Forged
  claims make a stage look fuller than it is, so they keep holders where they are.

One holder of the run may move in each minute. All holders draw the same one: by Sybil group, so many identities come no sooner.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gossamer.peer.machine.units import percent_text
from gossamer.peer.node.lasting import HeldShare
from gossamer.peer.node.mates import ANSWER_S, ASKED, Mates
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.peer.sync.sources import Sources
from gossamer.protocol.limits import RECORD_LIFETIME_S
from gossamer.protocol.messages.messages import Contents
from gossamer.protocol.messages.terms import StageTerms
from gossamer.protocol.tasks import loop_s

SETTLED_S = 1200.0  # of a start, before a holder moves: a moved one has fetched its weights, and the pace has changed
WAITING_LOOKS = 300  # looks, one a second, in which the trainer's waits are counted
WAITING_SHARE = 0.4  # of them without work: with three holders in the stage, two of them can do the whole work
LEAST_STAYING = 2  # holders, of as many Sybil groups
TURN_S = 60.0  # for which one holder of the run may move; it asks in the first quarter, so that its record is seen before the next turn


@dataclass(slots=True)
class Rebalancing:
    """Decide whether to move, and where. Belongs to one event loop. `fits`: the stages, from 0, that this peer's devices can hold.

    `waiting` is the share of time in which own trainer has no work; `now_s` returns the swarm's Unix time.
    """

    mates: Mates
    fits: tuple[int, ...]
    waiting: HeldShare
    now_s: Callable[[], float]
    rng: random.Random
    _since_s: float = field(default_factory=loop_s)
    _turn: int = 0  # that was ours last

    async def find_destination(self) -> int | None:
        """Return the stage to move to now, counted from one; None: stay. Takes ANSWER_S a few times."""
        if not (self._is_starved and loop_s() - self._since_s >= SETTLED_S and (stage := self._narrowest())):
            return None
        if not self._is_our_turn() or not await self._is_held(stage):
            return None
        asked = self._asked_mates()
        await self.mates.ask(asked)
        leaves = self._may_leave_to(stage) and await self.mates.leave_to(asked, stage, lambda: self._may_leave_to(stage))
        return stage if leaves else None

    def reason(self, stage: int) -> str:
        """Return why this peer moves to a stage, in words."""
        terms, own = self._terms, self.mates.own_stage
        claims = {one: len(self._claimed(one)) for one in (own, stage)}
        waited = f"its trainer waited for work {percent_text(self.waiting.share)} of the last {WAITING_LOOKS // 60} min"
        return f"{waited}; {terms.name_of(own)} has {claims[own]} other holders, {terms.name_of(stage)} had {claims[stage]}"

    @property
    def _is_starved(self) -> bool:
        """Whether the trainer has waited for much of the time, and the run goes on nevertheless: each micro-batch passes all stages."""
        membership, lifecycle = self.mates.membership, self.mates.lifecycle
        is_ending = membership.total_steps - lifecycle.global_step <= membership.terms.max_clock_gap_steps
        return lifecycle.may_meet and not is_ending and WAITING_SHARE <= self.waiting.share < 1.0

    @property
    def _terms(self) -> StageTerms:
        assert self.mates.membership.terms.stage is not None
        return self.mates.membership.terms.stage

    @property
    def _groups(self) -> SybilGroups:
        return self.mates.sources.groups

    def _claimed(self, stage: int) -> list[KnownPeer]:
        return self._groups.book.claimed(stage, loop_s())

    def _num(self, entries: Sequence[KnownPeer]) -> int:
        membership = self.mates.membership
        return self._groups.num_apart(entries, membership.identity.peer_id, membership.credential, loop_s())

    def _narrowest(self) -> int | None:
        """Return the other stage that the fewest groups claim, then the fewest peers, counted from one; None if it is not for us."""
        others = [stage for stage in range(1, self._terms.count + 1) if stage != self.mates.own_stage]
        num_claims = {stage: (self._num(self._claimed(stage)), len(self._claimed(stage))) for stage in others}
        stage = min(others, key=lambda one: num_claims[one])
        return stage if stage - 1 in self.fits and any(num_claims[stage]) else None

    def _is_our_turn(self) -> bool:
        """Return whether of all holders of the run this one is drawn now. A turn is used once.

        Those that have just moved, or cannot move, are drawn too: else the turn of one would go on to the next.
        """
        turn, since_s = divmod(self.now_s(), TURN_S)
        if since_s > TURN_S / 4 or turn == self._turn:
            return False
        identity, credential = self.mates.membership.identity, self.mates.membership.credential
        own = self._groups.drawn(identity.peer_id, credential, int(turn))
        rivals = [entry for entry in self._groups.book.seen_lately(loop_s()) if entry.stage and _is_heard(entry)]
        is_ours = all(own < self._drawn(entry, int(turn)) for entry in rivals)
        self._turn = int(turn) if is_ours else self._turn
        return is_ours

    def _drawn(self, entry: KnownPeer, turn: int) -> tuple[bytes, bytes]:
        return self._groups.drawn(entry.peer_id, entry.credential, turn)

    async def _is_held(self, stage: int) -> bool:
        """Return whether a holder of the other stage gives its weights, of about our global step."""
        own, lifecycle = self.mates.sources, self.mates.lifecycle
        sources = Sources(replace(own.client, stage=stage), own.groups, self.rng)
        there = self._groups.book.holders(stage, loop_s())
        asked = self.rng.sample(there, min(ASKED, len(there)))
        answers = await sources.ask_for_headers(asked, ANSWER_S)
        most_apart_steps = self.mates.membership.terms.max_clock_gap_steps
        headers = [answer for _, answer in answers if isinstance(answer, Contents)]
        return any(abs(header.global_step - lifecycle.global_step) <= most_apart_steps for header in headers)

    def _asked_mates(self) -> list[KnownPeer]:
        known = [entry for entry in self.mates.claims() if entry.has_met]
        return self.rng.sample(known, len(known))

    def _may_leave_to(self, stage: int) -> bool:
        """Return whether enough holders stay: as many as the other stage will have with us. Of a large stage not all are asked."""
        answered, asked = self.mates.answered, self.mates.asked
        others = [entry for entry in self.mates.claims() if entry.has_met and _is_heard(entry) and entry not in asked]
        me, credential = self.mates.membership.identity.peer_id, self.mates.membership.credential
        is_crowded = self._groups.are_more([*answered, *others], self._claimed(stage), me, credential, loop_s())
        return self._is_starved and is_crowded and self._num(answered) >= LEAST_STAYING


def _is_heard(entry: KnownPeer) -> bool:
    return loop_s() - entry.seen_s < RECORD_LIFETIME_S
