"""The lanes of one node: which to have, who may open one to us, and what the neighbours say.

A holder keeps lanes to a few random holders of the next stage and draws one of them anew each minute, so that micro-batches mix in a large
swarm. A holder that nobody calls opens a lane to the stage below itself: routers cost reach only where both sides are closed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from gossamer.peer.link.messages import FollowClock
from gossamer.peer.link.socket import NodeEnd
from gossamer.peer.node.stage_report import StageReport
from gossamer.peer.pipeline.commands import CloseLane, HopOver
from gossamer.peer.pipeline.driver import OpenLane, Pipeline
from gossamer.peer.pipeline.greeting import LaneSide
from gossamer.peer.pipeline.lane import DownLane, UpLane
from gossamer.peer.swarm.address_book import KnownPeer, loop_s
from gossamer.peer.swarm.lifecycle import Lifecycle, LifecycleState
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.protocol.errors import BadMessage, PeerMisbehaved, RefusalCode, Refused, TransportError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Lane, RunPhase
from gossamer.protocol.messages.terms import StageTerms
from gossamer.protocol.streams.transport import Purpose, Stream, Transport
from gossamer.protocol.tasks import cancel, spawn

log = logging.getLogger(__name__)

DOWN_LANES = 4
MOST_UP_LANES = 8
LOOK_S = 1.0  # between two looks at which lanes are missing
REDRAW_S = 60.0
UNCALLED_S = 3.0  # without a lane from the stage below, until we open one
CONNECT_S = 15.0
YOUNG_S = 5.0  # both sides have opened a lane at the same moment: the first one stands


@dataclass(slots=True)
class Carrying:
    """Keep lanes while the lifecycle state allows it, and answer inbound ones. Belongs to one event loop."""

    membership: Membership
    lifecycle: Lifecycle
    transport: Transport
    peer_exchange: PeerExchange
    pipeline: Pipeline
    link: NodeEnd
    rng: random.Random
    report: StageReport
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _opened_s: dict[int, float] = field(default_factory=dict)  # when each lane was opened; loop time
    _calling: set[PeerId] = field(default_factory=set)
    _calls: set[asyncio.Task[None]] = field(default_factory=set)
    _retired: set[int] = field(default_factory=set)  # lanes that end with their last hop
    _redrawn_s: float = 0.0
    _uncalled_s: float = 0.0  # since when no lane from the stage below is open; loop time
    _told_steps: int = 0  # the highest global step that the trainer was told

    @property
    def stage(self) -> StageTerms:
        """The stage that this peer holds."""
        return self.pipeline.carrier.stage

    async def run(self) -> None:
        """Keep lanes until cancelled. Raises our own bugs."""
        self._redrawn_s = self._uncalled_s = loop_s()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.pipeline.run())
                while True:
                    self._look()
                    await asyncio.sleep(LOOK_S)
        finally:
            await cancel(*self._calls)

    def begin_leaving(self) -> None:
        """Begin no hop and accept none any more."""
        self.pipeline.stop()

    async def until_quiet(self, grace_s: float) -> None:
        """Wait for the end of the hops under way, `grace_s` at most, then end every lane."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.pipeline.changes.until(lambda: self.pipeline.carrier.is_quiet)
        for open_lane in list(self.pipeline.lanes.values()):
            self.pipeline.end_lane(open_lane, "leaving")

    def on_report(self, report: HopOver) -> None:
        """Count a hop that is over, and log why one was not carried out."""
        self.report.count(report)
        if report.reason:
            log.info("hop %d after %d tries: %s: %s", report.hop, report.tries, report.outcome.value, report.reason)

    def on_clock(self, open_lane: OpenLane, global_step: int) -> None:
        """Note a neighbour's global step, and have own trainer follow one that is ahead, within the largest gap between two partners."""
        self.peer_exchange.book.note_global_step(open_lane.lane.partner, global_step)
        own_steps = self.lifecycle.global_step
        is_near = own_steps < global_step <= own_steps + self.membership.terms.max_clock_gap_steps
        if is_near and global_step > self._told_steps:
            self._told_steps = global_step
            self.link.notify(FollowClock(global_step))

    # ------------------------------------------------------------------ which lanes to have

    @property
    def _is_training(self) -> bool:
        return self.lifecycle.may_meet and self.lifecycle.phase is RunPhase.TRAIN and self.link.connected

    def _look(self) -> None:
        carrier = self.pipeline.carrier
        is_training = self._is_training
        changes = (carrier.global_step, carrier.may_begin) != (self.lifecycle.global_step, is_training)
        carrier.global_step, carrier.may_begin = self.lifecycle.global_step, is_training
        if changes:
            self.pipeline.wake()
        self.report.look(self.pipeline, is_training=is_training)
        if not is_training:
            self._rest()
            return
        self._retire()
        num_down = len(carrier.down) + sum(self.peer_exchange.book.get(peer).stage == self._next_stage for peer in self._calling)
        if not self.stage.is_last and num_down < DOWN_LANES:
            self._call(self._next_stage)
        if carrier.up or self.stage.is_first or not carrier.is_complete:
            self._uncalled_s = loop_s()
        elif loop_s() - self._uncalled_s >= UNCALLED_S:
            self._call(self._next_stage - 2)

    def _rest(self) -> None:
        """End the lanes of a peer whose trainer takes no hops now: its neighbours look elsewhere."""
        is_idle = self.pipeline.carrier.is_quiet and not self.pipeline.lanes
        if not is_idle and self.lifecycle.state is not LifecycleState.LEAVING:
            self.pipeline.rest("the run has ended here" if self.lifecycle.finished else "not training now")

    @property
    def _next_stage(self) -> int:
        """The next stage, counted from one."""
        return self.stage.stage + 2

    def _retire(self) -> None:
        """Draw a lane anew each minute, if there are other holders; a lane ends when its last hop is answered."""
        down, now_s = self.pipeline.carrier.down, loop_s()
        if len(down) >= DOWN_LANES and now_s - self._redrawn_s >= REDRAW_S and self._candidates(self._next_stage):
            self._redrawn_s = now_s
            lane = self.rng.choice(list(down.values()))
            lane.rests_until_s = float("inf")
            self._retired.add(lane.number)
        for number in list(self._retired):
            if number not in down or not down[number].unanswered:
                self._retired.discard(number)
                if (open_lane := self.pipeline.lanes.get(number)) is not None:
                    self.pipeline.end_lane(open_lane, "redrawn")

    def _candidates(self, stage: int) -> list[KnownPeer]:
        """Return the live holders of a stage, counted from one, to whom a lane may be opened now."""
        now_s = loop_s()
        taken = self._calling | {open_lane.lane.partner for open_lane in self.pipeline.lanes.values()}
        holders = self.peer_exchange.book.holders(stage, now_s)
        return [entry for entry in holders if entry.peer_id not in taken and entry.backs_off_until_s <= now_s]

    def _call(self, stage: int) -> None:
        candidates = self._candidates(stage)
        if candidates:
            entry = self.rng.choice(candidates)
            self._calling.add(entry.peer_id)
            spawn(self._open(entry, stage), self._calls, f"lane to {entry.peer_id.short()}")

    async def _open(self, entry: KnownPeer, stage: int) -> None:
        book, partner, began_s = self.peer_exchange.book, entry.peer_id, loop_s()
        stream: Stream | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                stream = await self.transport.connect(partner, entry.addresses, Purpose.PASS)
            theirs = await self._own_side(partner).open(stream, stage, self.rng)
            self._calling.discard(partner)
            await self._carry(stream, theirs)
        except Refused as refusal:
            if refusal.code is RefusalCode.NOT_READY:
                book.note_not_ready(partner, loop_s())
            else:
                book.note_refusal(partner, loop_s())
            self.report.refused(stage, refusal)
        except PeerMisbehaved:
            book.ban(partner, loop_s())
        except (TransportError, TimeoutError):
            book.note_failure(partner, loop_s(), loop_s() - began_s)
        finally:
            self._calling.discard(partner)
            if stream is not None:
                await stream.close()

    # ------------------------------------------------------------------ who opens one to us

    async def answer(self, stream: Stream) -> None:
        """Serve an inbound `Pass` stream until it ends. Raises Refused and PeerMisbehaved for the partner, TransportError."""
        first = await stream.receive()
        if not isinstance(first, Lane):
            raise BadMessage(f"a lane begins with a Lane, not with a {type(first).__name__}")
        own = self._own_side(stream.partner)
        own.check(stream, first)
        self._need_room(stream.partner, first)
        await own.answer(stream, first, self.rng)
        await self._carry(stream, first, window=own.window)

    def _need_room(self, partner: PeerId, first: Lane) -> None:
        """Raise Refused unless we may carry hops with a holder now. An older lane of the same holder has broken, and ends."""
        carrier, is_from_below = self.pipeline.carrier, first.stage < self._next_stage - 1
        if (code := self.lifecycle.refusal) is not None:
            raise Refused(code)
        if is_from_below and not carrier.is_complete:
            raise Refused(RefusalCode.NOT_READY, f"nobody holds stage {self._next_stage} of {self.stage.count}")
        if not self.peer_exchange.book.is_welcome(partner, loop_s()):
            raise Refused(RefusalCode.BUSY, "backing off after a lane with you that fell silent")
        for open_lane in list(self.pipeline.lanes.values()):
            if open_lane.lane.partner != partner:
                continue
            if loop_s() - self._opened_s.get(open_lane.lane.number, 0.0) < YOUNG_S:
                raise Refused(RefusalCode.BUSY, "there is a lane between us")
            self.pipeline.end_lane(open_lane, "replaced by a newer lane")
        if is_from_below and len(carrier.up) >= MOST_UP_LANES:
            raise Refused(RefusalCode.BUSY, "as many lanes as I allow")

    # ------------------------------------------------------------------ one lane

    def _own_side(self, partner: PeerId) -> LaneSide:
        exchange, lifecycle = self.peer_exchange, self.lifecycle
        window = self.pipeline.carrier.window
        records = exchange.records_for(partner)
        return LaneSide(self.membership, lifecycle.global_step, lifecycle.phase, window, records, exchange.time.now_s())

    async def _carry(self, stream: Stream, theirs: Lane, window: int = 0) -> None:
        """Carry hops on a lane whose sides have greeted each other, and learn from how it ends."""
        number, partner, book = next(self._numbers), stream.partner, self.peer_exchange.book
        book.note_call(partner, loop_s(), theirs.global_step)
        book.shows(partner, theirs.credential)
        book.connected(partner, stream.observed)
        book.note_answer(partner, loop_s())
        self.peer_exchange.take_all(theirs.records)
        self._opened_s[number] = loop_s()
        try:
            end = await self.pipeline.carry(stream, self._lane(number, partner, theirs, window))
        finally:
            del self._opened_s[number]
        self._learn(partner, end)
        if end.fault is not None:
            raise end.fault

    def _lane(self, number: int, partner: PeerId, theirs: Lane, window: int) -> UpLane | DownLane:
        if theirs.stage < self.membership.terms.own_stage:
            return UpLane(number, partner, window or self.pipeline.carrier.window)
        return DownLane.opened(number, partner, theirs.window, self.stage, self.peer_exchange.book.get(partner).typical_s)

    def _learn(self, partner: PeerId, end: CloseLane) -> None:
        book = self.peer_exchange.book
        if end.silent_s:
            book.note_broken_meeting(partner, loop_s(), end.silent_s)
        elif end.fault is None:
            book.note_not_ready(partner, loop_s())
