"""The node: everything of a peer that is network and not tensor, as loops in one task group.

It announces the peer and looks for others, gets a joiner its weights, finds a partner for every fragment that is due, answers those who
ask, and sees the run to its end. It knows its surroundings through `Transport`, `Directory` and `TrainerLink` only, so the simulated
swarms of the tests run this very class. The process around it: peer/node/process.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from peer.link import records as ask
from peer.machine.events import AddressesChanged, Event, MeetingDone, PeersSeen
from peer.meeting.driver import Tools
from peer.meeting.machine import Meeting
from peer.node.catch_up import CatchUp, NodeSettings
from peer.node.donor import FetchServer
from peer.node.fetching import FetchClient
from peer.node.final_averaging import FinalAveraging
from peer.node.joining import Joining
from peer.node.meetings import Meetings, Surroundings, say
from peer.node.partner_search import Searches
from peer.swarm.address_book import AddressBook, RecordIntake, loop_s
from peer.swarm.membership import Membership
from peer.swarm.presence import Presence, Standing, World
from protocol.errors import PeerMisbehaved, RefusalCode
from protocol.messages.messages import Refusal, RunPhase
from protocol.streams.transport import Purpose, Stream

LOOK_S = 0.5  # between two looks at what the supervisor is told of
CLOSE_S = 5.0  # for the last meetings of a run to end


class Node:
    """One peer's node. Everything belongs to one event loop. The book reckons in the loop's time."""

    def __init__(self, membership: Membership, world: World, tools: Tools, settings: NodeSettings, emit: Callable[[Event], None]) -> None:
        self.book = AddressBook(membership.identity.peer_id)
        self._membership = membership
        self._world = world
        self._tools = tools
        self._emit = emit
        self._standing = Standing()
        self._trainer_done = asyncio.Event()
        self._is_over = False
        self._donor: FetchServer | None = None
        intake = RecordIntake(membership.terms, self.book, world.now_s)
        surroundings = Surroundings(world.transport, self.book, intake, world.now_s, world.rng, self._on_meeting_done)
        self.meetings = Meetings(membership, surroundings, tools)
        self.searches = Searches(self.meetings, defer=membership.defer)
        self._presence = Presence(membership, world, intake, self._standing, settings.wait_for_peers)
        asker = FetchClient(membership.identity, membership.terms.run_id, membership.credential, world.transport)
        joining = Joining(asker, self.book, tools, emit)
        self._upkeep = CatchUp(settings, joining, self.meetings, self._presence.has_looked, world.rng)
        self._finishing = FinalAveraging(self.searches, self.book, len(membership.terms.fragments))

    def donor(self, manifest: bytes) -> FetchServer:
        """Return the one part of this node that serves manifest and state."""
        if self._donor is None or self._donor.manifest != manifest:
            membership, tools = self._membership, self._tools
            self._donor = FetchServer(
                membership.identity, membership.terms, manifest, tools.link, tools.payloads, self._world.now_s, self._own_clock
            )
        return self._donor

    def _own_clock(self) -> int | None:
        return self.meetings.clock_steps if self._upkeep.started.is_set() else None

    async def run(self) -> None:
        """Run until cancelled, or until the run is over and the trainer has saved its result.

        Raises an exception group with what cannot be mended here: SwarmUnreachable, RunRefusesUs, WrongVersion, or our own bug.
        """
        presence = self._presence
        loops = (presence.announce_for_ever(), presence.look_for_ever(), self.searches.run(), self._tell_supervisor(), self._upkeep.run())
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(loop) for loop in loops]
            await self._finishing.wanted.wait()
            await self._finishing.run()
            await self.meetings.close(CLOSE_S)
            self._is_over = True
            self._tools.link.tell(ask.FinishDone())
            await self._trainer_done.wait()
            for loop in running:
                loop.cancel()

    async def answer(self, purpose: Purpose, stream: Stream, donor: FetchServer) -> None:
        """Serve an inbound stream and close it. Raises PeerMisbehaved, for the log, when the partner broke the rules of a fetch."""
        if purpose is Purpose.MEET:
            await self.meetings.answer(stream)
        elif self.book.is_banned(stream.partner, loop_s()):
            await say(stream, Refusal(RefusalCode.NOT_INVITED, "banned for breaking the rules"))
            await stream.close()
        else:
            await self._give(stream, donor)

    async def _give(self, stream: Stream, donor: FetchServer) -> None:
        try:
            await donor.answer(stream)
        except PeerMisbehaved:
            self.book.ban(stream.partner, loop_s())
            raise

    async def leave(self, grace_s: float) -> None:
        """End the meetings in progress and tell the directory that we are gone."""
        await self.meetings.close(grace_s)
        await self._presence.leave()

    # ------------------------------------------------------------------ the trainer's word

    def on_notice(self, notice: ask.Notice) -> None:
        """Take in what the trainer says unasked."""
        match notice:
            case ask.Due():
                self.searches.on_due(notice)
            case ask.Progress():
                self._on_progress(notice)

    def _on_progress(self, progress: ask.Progress) -> None:
        self.meetings.clock_steps, self.meetings.phase = progress.clock_steps, progress.phase
        self._standing.clock_steps = progress.clock_steps
        self._upkeep.on_progress(progress)
        if progress.phase is RunPhase.FINISH and progress.started and not self._standing.finished:
            self._standing.finished = True
            self._presence.hurry()
            self._finishing.wanted.set()
        if progress.done:
            self._trainer_done.set()
        elif self._is_over:
            self._tools.link.tell(ask.FinishDone())  # another trainer than the one that we told, or the link broke in between

    # ------------------------------------------------------------------ telling

    def _on_meeting_done(self, meeting: Meeting, done: MeetingDone) -> None:
        if meeting.finish is not None:
            self._upkeep.on_meeting(meeting.partner, meeting.finish, initiated=meeting.initiates)
        if done.outcome == "completed" and meeting.pairing.phase is RunPhase.FINISH:
            self._finishing.completed(done.fragment)
        self._emit(done)

    async def _tell_supervisor(self) -> None:
        """Emit who is in sight, and where we can be reached, whenever that changes."""
        told: list[Event] = []
        while True:
            news: list[Event] = [PeersSeen(len(self.book.live(loop_s()))), AddressesChanged(self._world.addresses())]
            for event in news:
                if event not in told:
                    self._emit(event)
            told = news
            await asyncio.sleep(LOOK_S)
