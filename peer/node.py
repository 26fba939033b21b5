"""The node: everything of a peer that is network and not tensor, as loops in one task group.

It announces the peer and looks for others, gets a joiner its weights, finds a partner for every fragment that is due, answers those who
ask, and sees the run to its end. It knows its surroundings through `Transport`, `Directory` and `TrainerLink` only, so the simulated
swarms of the tests run this very class. The process around it: peer/node_process.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peer import requests as ask
from peer.driver import Tools
from peer.events import MeetingDone
from peer.finishing import Finishing
from peer.hearsay import Hearsay
from peer.joining import Joining, Wanted
from peer.meeting import Meeting
from peer.meetings import Meetings, Membership, Surroundings, say
from peer.partners import AddressBook
from peer.presence import Presence, Standing
from peer.presence import World as World
from peer.requests import Stage
from peer.searching import Searches
from peer.state_transfer import Asker, Donor
from protocol.errors import PeerMisbehaved
from protocol.messages import Refusal, RefusalCode
from protocol.transport import Purpose, Stream

REPORT_S = 0.5
KEEP_UP_S = 10.0  # between two looks at whether we have fallen behind
FIRST_LOOK_S = 3.0  # for the directory to tell a founder that its run goes on already
START_S = 60.0  # for the trainer to begin once it was told
COMPANY_S = 0.5
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What the operator and the run say of this node."""

    state_bytes: int  # of a clone of the weights
    max_clock_gap_steps: int
    total_steps: int
    wait_for_peers: int
    told_to_start: bool  # the trainer waits for our word
    is_founder: bool  # nobody to clone from: a waiting founder starts from the initial weights


class Node:
    """One peer's node. Everything belongs to one event loop. The book reckons in the loop's time."""

    def __init__(
        self, membership: Membership, world: World, tools: Tools, settings: NodeSettings, report: Callable[[dict[str, Any]], None]
    ) -> None:
        self.book = AddressBook(membership.identity.peer_id)
        self._membership = membership
        self._world = world
        self._tools = tools
        self._settings = settings
        self._report = report
        self._standing = Standing()
        self._told = asyncio.Event()  # the trainer has said where it stands
        self._started = asyncio.Event()  # it trains
        self._trainer_done = asyncio.Event()
        self._is_taking_over = False
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
        self._joining = Joining(asker, self.book, tools, report)
        self._finishing = Finishing(self.searches, self.book, len(membership.terms.fragments))
        self._log: Callable[[MeetingDone], None] = lambda _: None

    def on_meeting(self, log: Callable[[MeetingDone], None]) -> None:
        """Have every ended meeting told to `log`."""
        self._log = log

    def donor(self, manifest: bytes) -> Donor:
        """Return the one part of this node that serves manifest and state."""
        if self._donor is None or self._donor.manifest != manifest:
            membership, tools = self._membership, self._tools
            self._donor = Donor(
                membership.identity, membership.terms, manifest, tools.link, tools.payloads, self._world.now_s, self._started.is_set
            )
        return self._donor

    async def run(self) -> None:
        """Run until cancelled, or until the run is over and the trainer has saved its result.

        Raises an exception group with what cannot be mended here: SwarmUnreachable, RunRefusesUs, WrongVersion, or our own bug.
        """
        presence = self._presence
        loops = (presence.announce_for_ever(), presence.look_for_ever(), self.searches.run(), self._tell_supervisor(), self._keep_up())
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
        elif self.book.is_banned(stream.partner, _loop_s()):
            await say(stream, Refusal(RefusalCode.NOT_INVITED, "banned for breaking the rules"))
            await stream.close()
        else:
            await self._give(stream, donor)

    async def _give(self, stream: Stream, donor: Donor) -> None:
        try:
            await donor.answer(stream)
        except PeerMisbehaved:
            self.book.ban(stream.partner, _loop_s())
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
        self._told.set()
        if progress.started:
            self._started.set()
        else:
            self._started.clear()
        self._open_or_pause()
        if progress.stage is Stage.FINISH and progress.started and not self._standing.finished:
            self._standing.finished = True
            self._presence.hurry()
            self._finishing.wanted.set()
        if progress.done:
            self._trainer_done.set()
        elif self._is_over:
            self._tools.link.tell(ask.FinishDone())  # another trainer than the one that we told, or the link broke in between

    def _open_or_pause(self) -> None:
        if self._started.is_set() and not self._is_taking_over:
            self.meetings.open()
        else:
            self.meetings.pause()

    # ------------------------------------------------------------------ weights to begin with, or to catch up with

    async def _keep_up(self) -> None:
        """See that the trainer begins, also after it was restarted without a checkpoint, and that it does not fall too far behind."""
        while True:
            await self._told.wait()
            if not self._started.is_set():
                await self._begin()
            elif self._is_far_behind():
                await self._catch_up()
            await asyncio.sleep(KEEP_UP_S if self._started.is_set() else COMPANY_S)

    async def _begin(self) -> None:
        """Start the trainer: a founder with company enough from the initial weights, anybody else from a donor's."""
        await self._wait_for_company()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                await self._presence.has_looked.wait()
        if self._settings.is_founder and not self.book.typical_clock(_loop_s()):
            self._tools.link.tell(ask.Start())
        else:
            await self._joining.take_over(self._wanted, self._world.rng.shuffle)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._started.wait()

    async def _wait_for_company(self) -> None:
        while (seen := len(self.book.live(_loop_s()))) < self._settings.wait_for_peers:
            self._report({"state": "waiting", "reason": f"waiting for peers: {seen} seen, {self._settings.wait_for_peers} wanted"})
            await asyncio.sleep(COMPANY_S)

    def _is_far_behind(self) -> bool:
        behind_steps = self.book.typical_clock(_loop_s()) - self._standing.clock_steps
        return behind_steps > self._settings.max_clock_gap_steps and self.meetings.stage is Stage.TRAIN

    async def _catch_up(self) -> None:
        """A peer that comes back with an old checkpoint takes over a live one's weights rather than drag its partners back."""
        self._is_taking_over = True
        self._open_or_pause()
        try:
            await self.meetings.end("taking over newer weights", RefusalCode.NOT_READY)
            await self._joining.ask_everybody(self._wanted(), self._world.rng.shuffle)
        finally:
            self._is_taking_over = False
            self._open_or_pause()

    def _wanted(self) -> Wanted:
        settings = self._settings
        typical = self.book.typical_clock(_loop_s()) - settings.max_clock_gap_steps
        own = self._standing.clock_steps + 1 if self._started.is_set() else 0
        return Wanted(settings.state_bytes, min(settings.total_steps, max(own, typical)), settings.total_steps)

    # ------------------------------------------------------------------ telling

    def _on_meeting_done(self, meeting: Meeting, done: MeetingDone) -> None:
        kind = {"completed": "completed", "busy": "refused", "refused": "refused"}.get(done.outcome, "failed")
        self._counts[kind] += 1
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
                    "peers_seen": len(self.book.live(_loop_s())),
                    "meetings": dict(self._counts),
                    "bytes": dict(self._bytes),
                    "lane_counts": dict(self._lanes),
                    "addresses": list(self._world.addresses()),
                }
            )
            await asyncio.sleep(REPORT_S)


def _loop_s() -> float:
    return asyncio.get_running_loop().time()
