"""The node: everything of a peer that is network and not tensor, as loops in one task group.

It announces the peer and looks for others, gets a joiner its weights, finds a partner for every fragment that is due, answers those who
ask, and sees the run to its end. It knows its surroundings through `Transport`, `Directory` and `TrainerLink` only, so the simulator
runs this very class. The process around it: peer/node_process.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peer import requests as ask
from peer.driver import Tools
from peer.events import MeetingDone
from peer.finishing import Finishing
from peer.joining import Joining
from peer.meetings import Meetings, Membership, Surroundings
from peer.partners import AddressBook
from peer.requests import Stage
from peer.state_transfer import Asker, Donor
from protocol.errors import GossamerError, TransportError
from protocol.limits import RECORD_LIFETIME_S
from protocol.records import MemberRecord, announceable
from protocol.terms import check_record
from protocol.transport import Directory, Purpose, Stream, Transport

ANNOUNCE_S = 20.0
RECORD_S = 90  # how long a record stays in force; a dead peer is forgotten after so long
LOOK_S = (2.0, 20.0)  # between two looks at the directory: while nobody is known, and later
REPORT_S = 0.5
CATCH_UP_S = 10.0


@dataclass(frozen=True, slots=True)
class World:
    """Where a node lives."""

    transport: Transport
    directory: Directory
    addresses: Callable[[], tuple[str, ...]]  # own ones, as others may dial them
    now_s: Callable[[], float]  # Unix time
    rng: random.Random


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
    """One peer's node. Everything belongs to one event loop."""

    def __init__(
        self, membership: Membership, world: World, tools: Tools, settings: NodeSettings, report: Callable[[dict[str, Any]], None]
    ) -> None:
        self.book = AddressBook(membership.identity.peer_id)
        self._membership = membership
        self._world = world
        self._tools = tools
        self._settings = settings
        self._report = report
        self._progress: ask.Progress | None = None
        self._told = asyncio.Event()  # the trainer has said where it stands
        self._trainer_done = asyncio.Event()
        self._sequence = 0
        self._counts = {"completed": 0, "refused": 0, "failed": 0}
        self._bytes = {"sent": 0, "received": 0}
        self._lanes: dict[str, int] = {}
        surroundings = Surroundings(world.transport, self.book, world.now_s, world.rng, self._on_meeting_done)
        self.meetings = Meetings(membership, surroundings, tools)
        asker = Asker(membership.identity, membership.terms.run_id, membership.credential, world.transport)
        self._joining = Joining(asker, self.book, tools, settings.state_bytes, report)
        self._finishing = Finishing(self.meetings, len(membership.terms.fragments))
        self._log: Callable[[MeetingDone], None] = lambda _: None

    def on_meeting(self, log: Callable[[MeetingDone], None]) -> None:
        """Have every ended meeting told to `log`."""
        self._log = log

    def donor(self, manifest: bytes) -> Donor:
        """Make the part that serves manifest and state."""
        membership, tools = self._membership, self._tools
        return Donor(membership.identity, membership.terms, manifest, tools.link, tools.payloads, self._world.now_s, self._has_started)

    async def run(self) -> None:
        """Run until cancelled, or until the run is over and the trainer told so. Raises what cannot be mended here."""
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(loop) for loop in (self._announce(), self._look(), self._tell_supervisor(), self._catch_up())]
            await self._begin()
            await self._finishing.wanted.wait()
            await self._finishing.run()
            self._tools.link.tell(ask.FinishDone())
            await self._trainer_done.wait()
            for loop in loops:
                loop.cancel()

    async def answer(self, purpose: Purpose, stream: Stream, donor: Donor) -> None:
        """Serve an inbound stream."""
        self.book.saw(stream.partner, self._world.now_s())
        if purpose is Purpose.MEET:
            await self.meetings.answer(stream)
        else:
            await donor.answer(stream)

    async def leave(self, grace_s: float) -> None:
        """End the meetings in progress and tell the directory that we are gone."""
        await self.meetings.close(grace_s)
        with contextlib.suppress(TransportError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._world.directory.announce(self._record(lifetime_s=1))

    # ------------------------------------------------------------------ the trainer's word

    def on_notice(self, notice: ask.Notice) -> None:
        """Take in what the trainer says unasked."""
        match notice:
            case ask.Due():
                self.meetings.on_due(notice)
            case ask.Progress():
                self._progress = notice
                self.meetings.clock_steps, self.meetings.stage = notice.clock_steps, notice.stage
                self._told.set()
                if notice.done:
                    self._trainer_done.set()
                if notice.stage is Stage.FINISH:
                    self._finishing.wanted.set()

    def _has_started(self) -> bool:
        return self._progress is not None and self._progress.started

    def _clock_steps(self) -> int:
        return self._progress.clock_steps if self._progress else 0

    async def _begin(self) -> None:
        """See that the trainer starts: it has a checkpoint, or is a founder with company enough, or takes over a donor's weights."""
        await self._told.wait()
        if self._has_started():
            return
        await self._wait_for_company()
        if self._settings.is_founder:
            self._tools.link.tell(ask.Start())
        else:
            await self._joining.take_over_weights(self._world.now_s, self._world.rng)

    async def _wait_for_company(self) -> None:
        while (seen := len(self.book.live(self._world.now_s()))) < self._settings.wait_for_peers:
            self._report({"state": "waiting", "reason": f"waiting for peers: {seen} seen, {self._settings.wait_for_peers} wanted"})
            await asyncio.sleep(LOOK_S[0] / 4)

    async def _catch_up(self) -> None:
        """A peer that comes back with an old checkpoint takes over a live one's weights rather than drag its partners back."""
        while True:
            await asyncio.sleep(CATCH_UP_S)
            behind = self.book.furthest_clock(self._world.now_s()) - self._clock_steps()
            if self._has_started() and behind > self._settings.max_clock_gap_steps and self.meetings.stage is Stage.TRAIN:
                await self._joining.take_over_weights(self._world.now_s, self._world.rng, patience_s=CATCH_UP_S)

    # ------------------------------------------------------------------ the directory

    async def _announce(self) -> None:
        while True:
            with contextlib.suppress(TransportError, TimeoutError):
                async with asyncio.timeout(ANNOUNCE_S):
                    await self._world.directory.announce(self._record(lifetime_s=RECORD_S))
            await asyncio.sleep(ANNOUNCE_S if self.book.live(self._world.now_s()) else LOOK_S[0])

    def _record(self, *, lifetime_s: int) -> MemberRecord:
        now_s = int(self._world.now_s())
        self._sequence = max(self._sequence + 1, now_s)
        return MemberRecord(
            run_id=self._membership.terms.run_id,
            peer_id=self._membership.identity.peer_id,
            addresses=announceable(self._world.addresses(), self._membership.identity.peer_id),
            clock_steps=self._clock_steps(),
            finished=self.meetings.stage is Stage.FINISH,
            sequence=self._sequence,
            expires_s=now_s + min(lifetime_s, RECORD_LIFETIME_S),
            credential=self._membership.credential,
        ).signed(self._membership.identity)

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(TransportError, TimeoutError):
                async with asyncio.timeout(LOOK_S[1]):
                    for record in await self._world.directory.members():
                        self._learn(record)
            now_s = self._world.now_s()
            enough = len(self.book.announced(now_s)) >= max(1, self._settings.wait_for_peers)
            await asyncio.sleep(LOOK_S[1] if enough else LOOK_S[0])

    def _learn(self, record: MemberRecord) -> None:
        with contextlib.suppress(GossamerError):
            check_record(record, self._membership.terms, self._world.now_s())
            self.book.learn(record, self._world.now_s())

    # ------------------------------------------------------------------ telling

    def _on_meeting_done(self, done: MeetingDone) -> None:
        kind = {"completed": "completed", "busy": "refused", "refused": "refused"}.get(done.outcome, "failed")
        self._counts[kind] += 1
        self._bytes["sent"] += done.bytes_sent
        self._bytes["received"] += done.bytes_received
        if kind == "completed":
            self._lanes[done.lane] = self._lanes.get(done.lane, 0) + 1
            if self.meetings.stage is Stage.FINISH:
                self._finishing.completed(done.fragment)
        self._log(done)

    async def _tell_supervisor(self) -> None:
        while True:
            self._report(
                {
                    "peers_seen": len(self.book.live(self._world.now_s())),
                    "meetings": dict(self._counts),
                    "bytes": dict(self._bytes),
                    "lane_counts": dict(self._lanes),
                    "addresses": list(self._world.addresses()),
                }
            )
            await asyncio.sleep(REPORT_S)
