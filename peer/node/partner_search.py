"""Searches: for each fragment that is due, choose a partner, hold a meeting, and on any failure choose the next, until the deadline.

At the deadline the fragment takes a solo step (or waits on, if the manifest says `defer`). A meeting that another peer started on the same
fragment satisfies the search.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.peer.link import messages
from gossamer.peer.link.socket import NodeEnd
from gossamer.peer.meeting.commands import Finish
from gossamer.peer.meeting.interface import MeetingOutcome
from gossamer.peer.node.meetings import Meetings
from gossamer.peer.swarm.membership import Membership
from gossamer.protocol.identity import PeerId
from gossamer.protocol.tasks import loop_s

PAUSE_S = (0.05, 0.4)  # between two tries, so that two peers that called each other do not do it again in step
BUSY_S = 5.0  # at most, after a partner was busy
OWN_TROUBLE_S = 1.0  # after a meeting that our own side abandoned: the trainer restarts, or the disk is full


@dataclass(slots=True)
class Goal:
    """When a search has succeeded, and until when it tries."""

    num_completed: int  # meetings on the fragment that have counted by then
    until_s: float  # loop time


@dataclass(slots=True)
class Searches:
    """The searches of one node, as tasks of `run`."""

    membership: Membership
    meetings: Meetings
    link: NodeEnd
    rng: random.Random
    _new: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    _goals: dict[int, Goal] = field(default_factory=dict)

    def on_due(self, due: messages.Due) -> None:
        """Start a search for a fragment, or extend the one that runs."""
        if due.fragment not in self._goals:
            self._new.put_nowait(due.fragment)
        self._goals[due.fragment] = self._next_goal(due.fragment)

    async def run(self) -> None:
        """Serve until cancelled. Raises our own bugs."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                fragment = await self._new.get()
                tasks.create_task(self._search_or_solo(fragment), name=f"search {fragment}")

    async def search(self, fragment: int) -> bool:
        """Find a partner for a fragment, due or not, and meet it; False when nobody could be met in time.

        The run's deadline bounds the search; a meeting that has begun by then has its own. While none may begin it waits.
        """
        goal = self._next_goal(fragment)
        return await self._meet_until(fragment, lambda: goal)

    async def _search_or_solo(self, fragment: int) -> None:
        if not await self._meet_until(fragment, lambda: self._goals[fragment]):
            self.link.notify(messages.Defer(fragment) if self.membership.defer else messages.Solo(fragment))
        del self._goals[fragment]  # no await since the goal was checked last: a later Due starts a new search

    async def _meet_until(self, fragment: int, goal: Callable[[], Goal]) -> bool:
        tried: set[PeerId] = set()
        while self.meetings.completed[fragment] < goal().num_completed:
            if not await self._try(fragment, goal(), tried):
                return False
        return True

    def _next_goal(self, fragment: int) -> Goal:
        """One meeting more than have counted; one in progress that counts already may have been applied before the fragment was due."""
        active = self.meetings.active.get(fragment)
        is_decided = active is not None and active.meeting.is_decided
        return Goal(self.meetings.completed[fragment] + is_decided + 1, loop_s() + self.membership.deadline_s)

    async def _try(self, fragment: int, goal: Goal, tried: set[PeerId]) -> bool:
        """Wait for the meeting in progress, or begin one; False when there is nobody to meet before the goal's time."""
        meetings, loop = self.meetings, asyncio.get_running_loop()
        await meetings.lifecycle.until(lambda: meetings.lifecycle.may_meet)
        finish = None
        if (active := meetings.active.get(fragment)) is not None:
            await active.over.wait()
            if meetings.completed[fragment] < goal.num_completed and loop.time() >= goal.until_s:
                return False
        else:
            soonest_s = meetings.peer_exchange.book.soonest_s(loop.time())
            if soonest_s is None or max(soonest_s, loop.time()) >= goal.until_s:
                return False
            finish = await meetings.try_next(fragment, tried)
        if meetings.completed[fragment] < goal.num_completed:
            if finish is None and active is None:
                await meetings.until_callable(self.rng.uniform(*PAUSE_S), goal.until_s)
            else:
                await asyncio.sleep(self._pause_s(finish))
        return True

    def _pause_s(self, finish: Finish | None) -> float:
        """Return how long to wait after a try: after BUSY, about as long as a meeting takes."""
        match finish:
            case Finish(outcome=MeetingOutcome.ABANDONED):
                return OWN_TROUBLE_S
            case Finish(outcome=MeetingOutcome.BUSY):
                return self.rng.uniform(0.5, 1.5) * min(BUSY_S, self.meetings.typical_s)
        return self.rng.uniform(*PAUSE_S)
