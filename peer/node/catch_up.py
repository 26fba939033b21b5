"""When state comes here: the trainer is to begin, and to stay with the others. How it comes: peer/node/joining.py.

To begin, a founder starts from the run's initial weights, unless half of those who announce themselves have begun without it. Anybody else
does so too while the others are hardly further, if it has these weights: they follow from the seed, or lie in a folder of its own. Later,
or without them, it takes what others give. From then on a peer drops its own weights for others' in these cases alone, and only for such as
are further and predict its own text no worse:

- it is behind: no meeting counts, and the typical clock (of all heads, ours included: peer/swarm/heads.py) is further on than may meet;
- partners refuse it because the clocks are too far apart, and the clocks that they have signed say so too;
- the merge gate, theirs or ours, stops its meetings: after a partition, say.

Clocks only say where to look: no weights are taken over for their clock's sake, and no clock is followed further than most heads are.

Who is too far ahead of all others (they came back with old checkpoints) keeps its weights, and after STEP_BACK_S sets its clock back, for
they may catch up. The last two cases and this one need OUTCAST meetings in a row without one that counted, begun by us, with MANY partners
or all within reach. Nobody can force his own weights on us: a single liar moves no median, who calls us only to refuse us is not counted,
and whatever made us ask, a donor must sign a clock that lies about where most clocks are (`Wanted`).

Once half of the others have come to the end of the run, it takes the result that they settle on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection

from gossamer.peer.link import messages
from gossamer.peer.link.socket import NodeEnd
from gossamer.peer.machine.events import Event, ProcessSays
from gossamer.peer.meeting.words import Finish, MeetingOutcome
from gossamer.peer.node.joining import Joining, Wanted
from gossamer.peer.node.pulling import Pulling
from gossamer.peer.node.settlement import Settlement
from gossamer.peer.swarm.address_book import loop_s
from gossamer.peer.swarm.heads import Heads
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.swarm.presence import Presence
from gossamer.peer.swarm.standing import PeerState, Standing
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Contents, RunPhase

LOOK_S = 10.0  # between two looks at whether we have fallen behind
START_SHARE = 10  # of the gap that may be between two clocks: a tenth; who comes no later than that begins from the seed
FIRST_LOOK_S = 3.0  # for the directory to tell a founder that its run goes on already
START_S = 60.0  # for the trainer to begin once it was told
COMPANY_S = 0.5  # between two looks at whether there are peers enough to begin with
OUTCAST = 6  # meetings in a row that we began and that failed for our clock, or for the gate, without one that counted
REMEMBERED = 64  # of those meetings
MANY = 3  # partners of a head at least, or all within reach, that they were with
COMPANY_KEPT_S = 20.0  # after a meeting that counted: no clock that others declare makes us doubt that we are with them
STEP_BACK_S = 60.0  # shut out for so long, far ahead of the others: they would have caught up if they could


class CatchUp:
    """See that the trainer begins (`has_start`: with the run's own weights) and stays with others (`is_founder`: if there are any)."""

    def __init__(
        self,
        membership: Membership,
        standing: Standing,
        presence: Presence,
        heads: Heads,
        joining: Joining,
        pulling: Pulling,
        settlement: Settlement,
        link: NodeEnd,
        emit: Callable[[Event], None],
        *,
        is_founder: bool,
        has_start: bool,
        wait_for_peers: int,
    ) -> None:
        self._state_bytes = membership.terms.state_bytes
        self._gap_steps = membership.terms.max_clock_gap_steps
        self._total_steps = membership.total_steps
        self._standing = standing
        self._presence = presence
        self._heads = heads
        self._book = heads.book
        self._joining = joining
        self._pulling = pulling
        self._settlement = settlement
        self._link = link
        self._emit = emit
        self._is_founder = is_founder
        self._has_start = has_start
        self._wait_for_peers = wait_for_peers
        self._too_far: deque[PeerId] = deque(maxlen=REMEMBERED)  # who refused us, in a row, without a meeting that counted
        self._gated: deque[PeerId] = deque(maxlen=REMEMBERED)  # likewise: whose gate, or at ours
        self._met_s = 0.0  # when the last meeting counted

    def on_meeting(self, partner: PeerId, finish: Finish, *, initiated: bool) -> None:
        """Take in how a meeting ended. Who calls us only to refuse us, as often as he likes, says nothing about our weights."""
        if finish.outcome is MeetingOutcome.COMPLETED:
            self._met_s = loop_s()
            self._forget_outcasts()
        elif not initiated:
            return
        elif finish.refusal is RefusalCode.CLOCK_TOO_FAR:
            self._too_far.append(partner)
        elif finish.outcome is MeetingOutcome.GATED or finish.refusal is RefusalCode.GATE:
            self._gated.append(partner)

    async def run(self) -> None:
        """See to it until cancelled. Raises what Joining raises when a trainer that waits for weights cannot get any."""
        standing = self._standing
        while True:
            await standing.until(lambda: standing.state is not PeerState.UNTOLD)
            if standing.state is PeerState.WAITING:
                await self._begin()
            elif standing.may_meet and standing.phase is RunPhase.TRAIN:
                await self._stay()
            await self._rest()

    async def _rest(self) -> None:
        """Wait for the next look: a moment where there is something to be done."""
        until_s = loop_s() + LOOK_S
        while loop_s() < until_s:
            await asyncio.sleep(COMPANY_S)
            if self._standing.state is PeerState.WAITING or self._standing.stale or self._is_ending():
                return

    async def _stay(self) -> None:
        if self._is_ending() and (found := await self._settlement.find()):
            await self._settlement.take(found)
        elif self._standing.stale:
            await self._pulling.pull_stale(self._need_young)
        else:
            await self._catch_up()

    def _is_ending(self) -> bool:
        """Tell whether half of the others have come to the end: then there is a result, or soon will be, and it is ours too."""
        return self._heads.half_say(loop_s(), lambda entry: entry.finished and not entry.failures, own=False)

    # ------------------------------------------------------------------ to begin with

    async def _begin(self) -> None:
        await self._wait_for_company()
        await self._presence.first_look(FIRST_LOOK_S)
        if self._has_start and self._is_founder and not self._heads.half_say(loop_s(), lambda entry: entry.clock_steps > 0):
            self._link.tell(messages.Start())
        else:
            await self._joining.hear_clocks()
            if self._has_start and self._typical_clock() <= self._gap_steps // START_SHARE:
                self._link.tell(messages.Start())
            else:
                await self._joining.take_over(self._to_begin_with)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._standing.until(lambda: self._standing.state is not PeerState.WAITING)

    async def _wait_for_company(self) -> None:
        while (seen := len(self._book.live(loop_s()))) < self._wait_for_peers:
            self._emit(ProcessSays("waiting", f"waiting for peers: {seen} seen, {self._wait_for_peers} wanted"))
            await asyncio.sleep(COMPANY_S)

    # ------------------------------------------------------------------ to stay with the others

    def _need_young(self, header: Contents) -> None:
        """Raise NoUse for the header of a fragment that is of another time than most are."""
        wanted = self._about(self._typical_clock(self._standing.clock_steps))
        wanted.check_clock(header)

    def wanted(self) -> Wanted | None:
        """Say which state would be of more use than our own weights; None when ours are good enough."""
        own, gap_steps = self._standing.clock_steps, self._gap_steps
        typical = self._typical_clock(own)
        if typical - own > gap_steps and not self._is_in_company():
            return self._about(typical, own + 1)
        if self._is_far_from_all():
            others = self._typical_clock()
            return self._about(others, own + gap_steps + 1) if own - others <= gap_steps else None
        return self._about(typical, own + 1) if self._is_outcast(self._gated) else None

    async def _catch_up(self) -> None:
        """Take over a useful state, if there is one to be wished for and to be had."""
        if self.wanted() is None and not self._is_outcast(self._too_far):
            return
        await self._joining.ask_clocks()
        wanted = self.wanted()
        if wanted is None:
            self._step_back()
        elif await self._joining.ask_everybody(lambda: self.wanted() or wanted) is None:
            self._forget_outcasts()
            self._book.forget_refusals(loop_s())

    def _step_back(self) -> None:
        """Set our clock back to where the others can meet us, if we are too far ahead of them and have been for long."""
        within_reach = self._typical_clock() + self._gap_steps * 3 // 4
        is_ahead = self._is_far_from_all() and within_reach < self._standing.clock_steps - self._gap_steps // 4
        if is_ahead and loop_s() - self._met_s > STEP_BACK_S:
            self._link.tell(messages.StepBack(within_reach))
            self._forget_outcasts()
            self._book.forget_refusals(loop_s())

    def _is_far_from_all(self) -> bool:
        return self._is_outcast([partner for partner in self._too_far if self._is_far(partner)])

    def _typical_clock(self, own_steps: int | None = None) -> int:
        return self._heads.typical_clock(loop_s(), self._total_steps, own_steps)

    def _is_in_company(self) -> bool:
        """Tell whether a meeting has just counted, and nobody who has a say has refused us since: no clock speaks against that."""
        has_met = self._met_s > 0.0 and loop_s() - self._met_s < COMPANY_KEPT_S
        return has_met and not self._voiced() & {*self._too_far, *self._gated}

    def _is_outcast(self, by: Collection[PeerId]) -> bool:
        if len(by) < OUTCAST:
            return False
        voiced = self._voiced()
        by = [partner for partner in by if partner in voiced]
        return len(by) >= OUTCAST and self._heads.half_name(loop_s(), set(by), MANY)

    def _voiced(self) -> set[PeerId]:
        """Return whose refusals say something: of a head with members whom we have met, a stranger's do not."""
        return {entry.peer_id for entry in self._heads.voices(loop_s()) if not entry.failures}

    def _is_far(self, partner: PeerId) -> bool:
        clock_steps = self._book.clock_of(partner)
        return clock_steps is not None and abs(clock_steps - self._standing.clock_steps) > self._gap_steps

    def _forget_outcasts(self) -> None:
        self._too_far.clear()
        self._gated.clear()

    def _to_begin_with(self) -> Wanted:
        """Want any state when no clock is known: whom the invite names has announced nothing yet."""
        typical, total_steps = self._typical_clock(), self._total_steps
        return self._about(typical) if typical else Wanted(self._state_bytes, 0, total_steps, total_steps)

    def _about(self, clock_steps: int, earliest_steps: int = 0) -> Wanted:
        """Want a state of about this clock, and no earlier than `earliest_steps`."""
        earliest_steps = max(0, earliest_steps, clock_steps - self._gap_steps)
        return Wanted(self._state_bytes, earliest_steps, min(self._total_steps, clock_steps + self._gap_steps), self._total_steps)
