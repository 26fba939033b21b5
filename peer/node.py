"""The node: everything of a peer that is network and not tensor, as loops in one task group.

It announces the peer and looks for others, gets a joiner its weights, finds a partner for every fragment that is due, answers those who
ask, and sees the run to its end. It knows its surroundings through `Transport`, `Directory` and `TrainerLink` only, so the simulated
swarms of the tests run this very class. The process around it: peer/node_process.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from peer import requests as ask
from peer.driver import Tools
from peer.events import MeetingDone, StateCloned
from peer.finishing import Finishing
from peer.hearsay import Hearsay
from peer.joining import Joining
from peer.loop_time import loop_s
from peer.meeting import Meeting
from peer.meetings import Meetings, Membership, Surroundings, say
from peer.partners import AddressBook
from peer.presence import Presence, Standing
from peer.presence import World as World
from peer.requests import Stage
from peer.searching import Searches
from peer.state_transfer import Asker, Donor
from peer.upkeep import NodeSettings as NodeSettings
from peer.upkeep import Upkeep
from protocol.errors import PeerMisbehaved
from protocol.messages import Refusal, RefusalCode
from protocol.transport import Purpose, Stream

REPORT_S = 0.5
CLOSE_S = 5.0  # for the last meetings of a run to end


class Node:
    """One peer's node. Everything belongs to one event loop. The book reckons in the loop's time."""

    def __init__(
        self, membership: Membership, world: World, tools: Tools, settings: NodeSettings, report: Callable[[dict[str, Any]], None]
    ) -> None:
        self.book = AddressBook(membership.identity.peer_id)
        self._membership = membership
        self._world = world
        self._tools = tools
        self._report = report
        self._standing = Standing()
        self._trainer_done = asyncio.Event()
        self._is_over = False
        self._donor: Donor | None = None
        self._counts = {"completed": 0, "refused": 0, "failed": 0}
        self._bytes = {"sent": 0, "received": 0}
        self._lanes: dict[str, int] = {}
        hearsay = Hearsay(membership.terms, self.book, world.now_s)
        surroundings = Surroundings(world.transport, self.book, hearsay, world.now_s, world.rng, self._on_meeting_done)
        self.meetings = Meetings(membership, surroundings, tools)
        self.searches = Searches(self.meetings, defer=membership.defer)
        self._presence = Presence(membership, world, hearsay, self._standing, settings.wait_for_peers)
        asker = Asker(membership.identity, membership.terms.run_id, membership.credential, world.transport)
        joining = Joining(asker, self.book, tools, report, lambda cloned: self._log(cloned))
        self._upkeep = Upkeep(settings, joining, self.meetings, self._presence.has_looked, world.rng)
        self._finishing = Finishing(self.searches, self.book, len(membership.terms.fragments))
        self._log: Callable[[MeetingDone | StateCloned], None] = lambda _: None

    def on_event(self, log: Callable[[MeetingDone | StateCloned], None]) -> None:
        """Have every ended meeting, and every donor's state that was taken over, told to `log`."""
        self._log = log

    def donor(self, manifest: bytes) -> Donor:
        """Return the one part of this node that serves manifest and state."""
        if self._donor is None or self._donor.manifest != manifest:
            membership, tools = self._membership, self._tools
            self._donor = Donor(
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

    async def answer(self, purpose: Purpose, stream: Stream, donor: Donor) -> None:
        """Serve an inbound stream and close it. Raises PeerMisbehaved, for the log, when the partner broke the rules of a fetch."""
        if purpose is Purpose.MEET:
            await self.meetings.answer(stream)
        elif self.book.is_banned(stream.partner, loop_s()):
            await say(stream, Refusal(RefusalCode.NOT_INVITED, "banned for breaking the rules"))
            await stream.close()
        else:
            await self._give(stream, donor)

    async def _give(self, stream: Stream, donor: Donor) -> None:
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
        self.meetings.clock_steps, self.meetings.stage = progress.clock_steps, progress.stage
        self._standing.clock_steps = progress.clock_steps
        self._upkeep.on_progress(progress)
        if progress.stage is Stage.FINISH and progress.started and not self._standing.finished:
            self._standing.finished = True
            self._presence.hurry()
            self._finishing.wanted.set()
        if progress.done:
            self._trainer_done.set()
        elif self._is_over:
            self._tools.link.tell(ask.FinishDone())  # another trainer than the one that we told, or the link broke in between

    # ------------------------------------------------------------------ telling

    def _on_meeting_done(self, meeting: Meeting, done: MeetingDone) -> None:
        kind = {"completed": "completed", "busy": "refused", "refused": "refused"}.get(done.outcome, "failed")
        self._counts[kind] += 1
        if meeting.outcome is not None:
            self._upkeep.on_meeting(meeting.partner, meeting.outcome, initiated=meeting.initiates)
        self._bytes["sent"] += done.bytes_sent
        self._bytes["received"] += done.bytes_received
        if kind == "completed":
            self._lanes[done.lane] = self._lanes.get(done.lane, 0) + 1
            if meeting.pairing.stage is Stage.FINISH:
                self._finishing.completed(done.fragment)
        self._log(done)

    async def _tell_supervisor(self) -> None:
        while True:
            self._report(
                {
                    "peers_seen": len(self.book.live(loop_s())),
                    "meetings": dict(self._counts),
                    "bytes": dict(self._bytes),
                    "lane_counts": dict(self._lanes),
                    "addresses": list(self._world.addresses()),
                }
            )
            await asyncio.sleep(REPORT_S)
