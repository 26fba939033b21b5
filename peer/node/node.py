"""The node: everything of a peer that meets and is not tensor, as loops in one task group.

It gets a joiner its weights, finds a partner for every fragment that is due, and sees the run to its end. It knows its surroundings
through `Transport`, `Directory` and `NodeEnd` only, so the simulated swarms of the tests run this very class. The process around it:
peer/node/process.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from gossamer.peer.link import messages
from gossamer.peer.machine.events import Event, MeetingDone
from gossamer.peer.meeting.driver import OwnSide
from gossamer.peer.meeting.machine import Meeting
from gossamer.peer.node.catch_up import CatchUp
from gossamer.peer.node.donor import StateDonor
from gossamer.peer.node.fetching import FetchClient
from gossamer.peer.node.final_averaging import FinalAveraging
from gossamer.peer.node.joining import Joining
from gossamer.peer.node.meetings import Meetings
from gossamer.peer.node.partner_search import Searches
from gossamer.peer.node.pulling import Pulling
from gossamer.peer.node.settlement import Settlement
from gossamer.peer.swarm.heads import Heads
from gossamer.peer.swarm.hearsay import Hearsay
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.swarm.presence import Presence
from gossamer.peer.swarm.standing import PeerState, Standing
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.streams.transport import Transport
from gossamer.protocol.tasks import work_until

CLOSE_S = 5.0  # for the last meetings of a run to end


class Node:
    """One peer's node, once its trainer has said what the model is. Everything belongs to one event loop."""

    def __init__(
        self,
        membership: Membership,
        standing: Standing,
        presence: Presence,
        hearsay: Hearsay,
        transport: Transport,
        own: OwnSide,
        downloads: Path,
        rng: random.Random,
        emit: Callable[[Event], None],
        *,
        is_founder: bool,
        has_start: bool,
        wait_for_peers: int,
    ) -> None:
        book, link = hearsay.book, own.link
        self._standing = standing
        self._link = link
        self._emit = emit
        self._trainer_done = asyncio.Event()
        self._is_over = False
        self.meetings = Meetings(membership, standing, transport, hearsay, own, rng, self._on_meeting_done)
        self.searches = Searches(membership, standing, book, self.meetings, link, rng)
        self.donor = StateDonor(link, own.payloads, standing, membership.terms, self.meetings.until_quiet)
        client = self.client = FetchClient(
            membership.identity, membership.terms.run_id, membership.credential, transport, (membership.terms.protocol_version,)
        )
        terms, heads = membership.terms, Heads(book, membership.terms)
        self.joining = Joining(client, terms, heads, standing, self.meetings, link, downloads / "state", rng, emit)
        pulling = Pulling(client, terms, book, standing, link, own.payloads, rng, emit)
        result = downloads / "result"
        settlement = Settlement(client, terms, heads, standing, self.meetings, self.donor, link, own.payloads, result, rng, emit)
        self.catch_up = CatchUp(
            membership, standing, presence, heads, self.joining, pulling, settlement, link, emit,
            is_founder=is_founder, has_start=has_start, wait_for_peers=wait_for_peers,
        )  # fmt: skip
        self._final_averaging = FinalAveraging(self.searches, self.meetings, book, settlement, len(terms.fragments), membership.total_steps)

    async def run(self) -> None:
        """Run until cancelled, or until the run is over and the trainer has saved its result.

        Raises an exception group with what cannot be mended here: SwarmUnreachable, RunRefusesUs, WrongVersion, or our own bug.
        """
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(loop) for loop in (self.searches.run(), self._catch_up_while_awake())]
            await self._standing.until(lambda: self._standing.finished)
            await self._final_averaging.run()
            await self.meetings.leave(CLOSE_S)
            self._is_over = True
            self._link.tell(messages.FinishDone())
            await self._trainer_done.wait()
            for loop in running:
                loop.cancel()

    # ------------------------------------------------------------------ the trainer's word

    async def _catch_up_while_awake(self) -> None:
        """Stay with the others, and begin anew after each pause: what was under way for a trainer that is gone is of no use."""
        standing = self._standing
        while True:
            await standing.until(lambda: standing.state is not PeerState.PAUSED)
            await work_until(self.catch_up.run(), standing.until(lambda: standing.state is PeerState.PAUSED))
            self._final_averaging.rested()

    def on_notice(self, notice: messages.Notice) -> None:
        """Take in what the trainer says unasked."""
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
            self._link.tell(messages.FinishDone())  # another trainer than the one that we told, or the link broke in between

    def _on_meeting_done(self, meeting: Meeting, done: MeetingDone) -> None:
        if meeting.finish is not None:
            self.catch_up.on_meeting(meeting.partner, meeting.finish, initiated=meeting.initiates)
        if done.outcome == "completed" and meeting.pairing.phase is RunPhase.FINISH:
            self._final_averaging.completed(done.fragment)
        self._emit(done)
