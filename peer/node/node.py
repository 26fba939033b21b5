"""The node's part that meets other peers, once its trainer has sent the model's plan.

It gets a joiner its weights, finds a partner for every fragment that is due, and sees the run to its end. How its parts are made and
connected: peer/node/peer.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gossamer.peer.link import messages
from gossamer.peer.link.socket import NodeEnd
from gossamer.peer.machine.events import Event, MeetingDone
from gossamer.peer.meeting.machine import Meeting
from gossamer.peer.node.final_averaging import FinalAveraging
from gossamer.peer.node.meetings import Meetings
from gossamer.peer.node.partner_search import Searches
from gossamer.peer.swarm.standing import PeerState, Standing
from gossamer.peer.sync.server import FetchServer
from gossamer.peer.sync.state_sync import StateSync
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.tasks import work_until

CLOSE_S = 5.0  # for the last meetings of a run to end


class Node:
    """Meetings, searches, catching up and the final averaging of one peer, as loops in one task group."""

    def __init__(
        self,
        meetings: Meetings,
        searches: Searches,
        server: FetchServer,
        state_sync: StateSync,
        final_averaging: FinalAveraging,
        standing: Standing,
        link: NodeEnd,
        emit: Callable[[Event], None],
    ) -> None:
        self.meetings = meetings
        self.searches = searches
        self.server = server
        self.state_sync = state_sync
        self._final_averaging = final_averaging
        self._standing = standing
        self._link = link
        self._emit = emit
        self._trainer_done = asyncio.Event()
        self._is_over = False

    async def run(self) -> None:
        """Run until cancelled, or until the run is over and the trainer has saved its result.

        Raises an exception group with what cannot be repaired here: SwarmUnreachable, RunRefusesUs, WrongVersion, or a bug.
        """
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(loop) for loop in (self.searches.run(), self._sync_while_awake())]
            await self._standing.until(lambda: self._standing.finished)
            await self._final_averaging.run()
            await self.meetings.leave(CLOSE_S)
            self._is_over = True
            self._link.tell(messages.FinishDone())
            await self._trainer_done.wait()
            for loop in running:
                loop.cancel()

    async def _sync_while_awake(self) -> None:
        """Stay with the others, and start anew after each pause: a transfer for the trainer of before the pause is of no use."""
        standing = self._standing
        while True:
            await standing.until(lambda: standing.state is not PeerState.PAUSED)
            await work_until(self.state_sync.run(), standing.until(lambda: standing.state is PeerState.PAUSED))
            self._final_averaging.paused()

    # ------------------------------------------------------------------ events of the trainer and of meetings

    def on_notice(self, notice: messages.Notice) -> None:
        """Handle what the trainer reports unasked."""
        match notice:
            case messages.Due():
                self.searches.on_due(notice)
            case messages.Progress():
                self._on_progress(notice)

    def _on_progress(self, progress: messages.Progress) -> None:
        self._standing.told(progress.clock_steps, progress.phase, progress.started, progress.tokens)
        if progress.started:
            self._final_averaging.trains(progress.clock_steps)
        if progress.done:
            self._trainer_done.set()
        elif self._is_over:
            self._link.tell(messages.FinishDone())  # the trainer was restarted, or the link broke before it read the first one

    def on_meeting_done(self, meeting: Meeting, done: MeetingDone) -> None:
        """Handle the end of a meeting."""
        if meeting.finish is not None:
            self.state_sync.on_meeting(meeting.partner, meeting.finish, initiated=meeting.initiates)
        if done.outcome == "completed" and meeting.pairing.phase is RunPhase.FINISH:
            self._final_averaging.completed(done.fragment)
        self._emit(done)
