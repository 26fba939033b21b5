"""CatchUp: see that the trainer begins, and that it stays with the others.

A founder starts from the run's initial weights, anybody else from a donor's. Later a peer takes over a live one's weights, rather than
drag its partners back, when it comes back with an old checkpoint, when it is too slow for the others' clock, when it is alone far ahead
(the others came back with old checkpoints), or when nobody wants to meet what has become of its own (after a partition, say).

Whoever can make us ask can give us his weights, so no single peer may: what others say of their clocks only makes us ask, and the donor's
own signed word, and that half of the known peers (ourselves included) are about there, decide. A row of failed meetings counts only where
we had called, with several partners, and a clock that is too far only where the partner has signed one that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from peer.link import records as ask
from peer.machine.events import ProcessSays
from peer.meeting.words import Finish, MeetingOutcome
from peer.node.joining import Joining, Wanted
from peer.node.meetings import Meetings
from peer.swarm.address_book import loop_s
from protocol.errors import RefusalCode
from protocol.identity import PeerId
from protocol.messages.messages import RunPhase

LOOK_S = 10.0  # between two looks at whether we have fallen behind
FIRST_LOOK_S = 3.0  # for the directory to tell a founder that its run goes on already
START_S = 60.0  # for the trainer to begin once it was told
COMPANY_S = 0.5  # between two looks at whether there are peers enough to begin with
OUTCAST = 6  # meetings in a row that we began and that failed for our clock, or for the gate, without one that counted
REMEMBERED = 64  # of those meetings
MANY = 3  # partners at least, or all within reach, that they were with; where it is so many, any donor will do for the gate
ROUNDS = 2  # of asking: the donors' answers to the first one say how far they are now
STEP_BACK_S = 60.0  # shut out for so long, far ahead of the others: they would have caught up if they could


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What the operator and the run say of this node."""

    state_bytes: int  # of a clone of the weights
    max_clock_gap_steps: int
    total_steps: int
    wait_for_peers: int
    is_founder: bool  # nobody to clone from: a waiting founder starts from the initial weights


class CatchUp:
    """The trainer's standing, as far as the node sees to it. `has_looked` is set once the directory was asked."""

    def __init__(self, settings: NodeSettings, joining: Joining, meetings: Meetings, has_looked: asyncio.Event, rng: random.Random) -> None:
        self.started = asyncio.Event()  # the trainer trains
        self._settings = settings
        self._joining = joining
        self._meetings = meetings
        self._has_looked = has_looked
        self._rng = rng
        self._told = asyncio.Event()  # the trainer has said where it stands
        self._is_taking_over = False
        self._too_far: deque[PeerId] = deque(maxlen=REMEMBERED)  # who refused us, in a row, without a meeting that counted
        self._gated: deque[PeerId] = deque(maxlen=REMEMBERED)  # likewise: whose gate, or at ours
        self._met_s = 0.0  # when the last meeting counted

    def on_progress(self, progress: ask.Progress) -> None:
        """Take in where the trainer stands."""
        self._told.set()
        if progress.started:
            self.started.set()
        else:
            self.started.clear()
        self._open_or_pause()

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
        while True:
            await self._told.wait()
            if not self.started.is_set():
                await self._begin()
            elif self._meetings.phase is RunPhase.TRAIN:
                await self._catch_up()
            await asyncio.sleep(LOOK_S if self.started.is_set() else COMPANY_S)

    def _open_or_pause(self) -> None:
        if self.started.is_set() and not self._is_taking_over:
            self._meetings.open()
        else:
            self._meetings.pause()

    # ------------------------------------------------------------------ to begin with

    async def _begin(self) -> None:
        await self._wait_for_company()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                await self._has_looked.wait()
        if self._settings.is_founder and not self._joining.book.has_begun(loop_s()):
            self._joining.tools.link.tell(ask.Start())
        else:
            await self._joining.take_over(self._to_begin_with, self._rng.shuffle)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self.started.wait()

    async def _wait_for_company(self) -> None:
        wanted = self._settings.wait_for_peers
        while (seen := len(self._joining.book.live(loop_s()))) < wanted:
            self._joining.emit(ProcessSays("waiting", f"waiting for peers: {seen} seen, {wanted} wanted"))
            await asyncio.sleep(COMPANY_S)

    # ------------------------------------------------------------------ to stay with the others

    def _typical_clock(self, own_steps: int | None = None) -> int:
        return self._joining.book.typical_clock(loop_s(), self._settings.total_steps, own_steps)

    def _useful(self) -> Wanted | None:
        """Say which clone would be of more use than our own weights; None when ours are good enough."""
        own, gap_steps = self._meetings.clock_steps, self._settings.max_clock_gap_steps
        typical = self._typical_clock(own)
        if typical - own > gap_steps:
            return self._about(typical, own + 1)
        if self._is_outcast([partner for partner in self._too_far if self._is_far(partner)]):
            others = self._typical_clock()
            if own - others <= gap_steps:
                return self._about(others, own + gap_steps + 1)
            return self._about(others) if loop_s() - self._met_s > STEP_BACK_S else None
        if self._is_outcast(self._gated):
            return self._about(typical, 0 if len(set(self._gated)) >= MANY else own + 1)
        return None

    def _is_outcast(self, by: Collection[PeerId]) -> bool:
        reachable = [entry for entry in self._joining.book.live(loop_s()) if not entry.failures]
        return len(by) >= OUTCAST and len(set(by)) >= min(MANY, len(reachable))

    def _is_far(self, partner: PeerId) -> bool:
        clock_steps = self._joining.book.clock_of(partner)
        return clock_steps is not None and abs(clock_steps - self._meetings.clock_steps) > self._settings.max_clock_gap_steps

    async def _catch_up(self) -> None:
        """Take over a useful clone, if there is one to be wished for and to be had.

        Who is shut out and knows no clock that explains it asks everybody for the clock alone.
        """
        try:
            for number in range(ROUNDS):
                wanted = self._useful()
                if wanted is None and (number or not self._is_outcast(self._too_far)):
                    return
                wanted = wanted or self._about(0, self._settings.total_steps + 1)
                if await self._joining.ask_everybody(wanted, self._rng.shuffle, self._make_way) is None:
                    self._forget_outcasts()
                    self._joining.book.forget_refusals(loop_s())
                    return
        finally:
            self._is_taking_over = False
            self._open_or_pause()

    async def _make_way(self) -> None:
        """End the meetings before other weights take the place of those that they are about."""
        self._is_taking_over = True
        self._open_or_pause()
        await self._meetings.end("taking over newer weights", RefusalCode.NOT_READY)

    def _forget_outcasts(self) -> None:
        self._too_far.clear()
        self._gated.clear()

    def _to_begin_with(self) -> Wanted:
        """Want any clone when no clock is known: whom the invite names has announced nothing yet."""
        typical, total_steps = self._typical_clock(), self._settings.total_steps
        return self._about(typical) if typical else Wanted(self._settings.state_bytes, 0, total_steps, total_steps)

    def _about(self, clock_steps: int, earliest_steps: int = 0) -> Wanted:
        """Want a clone of about this clock, and no earlier than `earliest_steps`."""
        total_steps, gap_steps = self._settings.total_steps, self._settings.max_clock_gap_steps
        earliest_steps = max(0, earliest_steps, clock_steps - gap_steps)
        return Wanted(self._settings.state_bytes, earliest_steps, min(total_steps, clock_steps + gap_steps), total_steps)
