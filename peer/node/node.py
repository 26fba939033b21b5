"""The node's part that meets other peers, once its trainer has sent the model's plan. peer/node/peer.py makes and connects its parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gossamer.peer.link import messages
from gossamer.peer.link.socket import NodeEnd
from gossamer.peer.machine.events import Event, MeetingDone
from gossamer.peer.meeting.machine import Meeting
from gossamer.peer.node.final_averaging import FinalAveraging
from gossamer.peer.node.meetings import Meetings
from gossamer.peer.node.partner_search import Searches
from gossamer.peer.swarm.lifecycle import Lifecycle, LifecycleState
from gossamer.peer.sync.state_source import StateSource
from gossamer.peer.sync.state_sync import StateSync
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.tasks import work_until

if TYPE_CHECKING:
    from gossamer.peer.node.carrying import Carrying  # only staged runs load them
    from gossamer.peer.node.ward import Ward

CLOSE_S = 5.0  # for the last meetings and hops of a run to end


@dataclass(slots=True)
class Node:
    """Meetings, searches, catching up and the final averaging of one peer, as loops in one task group."""

    meetings: Meetings
    searches: Searches
    source: StateSource
    state_sync: StateSync
    final_averaging: FinalAveraging
    lifecycle: Lifecycle
    link: NodeEnd
    emit: Callable[[Event], None]
    carrying: Carrying | None = None  # in a staged run
    ward: Ward | None = None  # likewise
    _trainer_done: asyncio.Event = field(default_factory=asyncio.Event)
    _is_over: bool = False

    async def run(self) -> None:
        """Run until cancelled, or until the run is over and the trainer has saved its result. Raises as `NodePeer.run`."""
        async with asyncio.TaskGroup() as tasks:
            loops = [self.searches.run(), self._sync_while_awake()]
            loops += [self.carrying.run()] if self.carrying else []
            loops += [self.ward.run()] if self.ward else []
            running = [tasks.create_task(loop) for loop in loops]
            await self.lifecycle.until(lambda: self.lifecycle.finished)
            await self.final_averaging.run()
            await self.leave(CLOSE_S)
            self._is_over = True
            self.link.notify(messages.FinishDone())
            await self._trainer_done.wait()
            for loop in running:
                loop.cancel()

    @property
    def is_quiet(self) -> bool:
        """Whether no meeting is in progress, and no lane is open."""
        return not self.meetings.active and (self.carrying is None or not self.carrying.pipeline.lanes)

    async def leave(self, grace_s: float) -> None:
        """Start nothing any more, and finish or drop meetings and hops, all within `grace_s`."""
        hops = self.carrying.leave(grace_s) if self.carrying is not None else asyncio.sleep(0)
        await asyncio.gather(self.meetings.leave(grace_s), hops)

    async def _sync_while_awake(self) -> None:
        """Stay with the others, and start anew after each pause: a transfer for the trainer of before the pause is of no use."""
        lifecycle = self.lifecycle
        while True:
            await lifecycle.until(lambda: lifecycle.state is not LifecycleState.PAUSED)
            await work_until(self.state_sync.run(), lifecycle.until(lambda: lifecycle.state is LifecycleState.PAUSED))
            self.final_averaging.forget_pace()

    def on_report(self, report: messages.TrainerReport) -> None:
        """Handle what the trainer reports unasked."""
        match report:
            case messages.Due():
                self.searches.on_due(report)
            case messages.Progress():
                self._on_progress(report)

    def _on_progress(self, progress: messages.Progress) -> None:
        self.lifecycle.update(progress.global_step, progress.phase, progress.started, progress.tokens, progress.own_steps)
        if progress.started:
            self.final_averaging.note_global_step(progress.global_step)
        if progress.done:
            self._trainer_done.set()
        elif self._is_over:
            self.link.notify(messages.FinishDone())  # the trainer was restarted, or the link broke before it read the first one

    def on_meeting_done(self, meeting: Meeting, done: MeetingDone) -> None:
        """Handle the end of a meeting."""
        if meeting.finish is not None:
            self.state_sync.on_meeting(meeting.partner, meeting.finish, initiated=meeting.initiates)
        if done.outcome == "completed" and meeting.pairing.phase is RunPhase.FINISH:
            self.final_averaging.note_meeting(done.fragment)
        self.emit(done)
