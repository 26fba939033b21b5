"""The lanes of one node: which to have, who may open one to us, and what the neighbours say.

A holder keeps lanes to a few random holders of the next stage and draws one of them anew each minute, so that micro-batches mix in a large
swarm. A holder that nobody calls opens a lane to the stage below itself, so a router keeps two holders apart only if both are behind one.
The partner of a call is drawn by Sybil group, and lanes that strangers have opened to us replace none of those that we have opened.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gossamer.peer.link.messages import FollowClock
from gossamer.peer.link.socket import NodeEnd
from gossamer.peer.node.lasting import HeldShare, Lasting
from gossamer.peer.node.partner_file import shunned
from gossamer.peer.node.rebalancing import WAITING_LOOKS
from gossamer.peer.node.stage_end import StageEnd
from gossamer.peer.node.stage_report import StageReport
from gossamer.peer.pipeline.commands import AnswersCompared, CloseLane, SourceOpposed
from gossamer.peer.pipeline.driver import OpenLane, Pipeline
from gossamer.peer.pipeline.greeting import LaneSide
from gossamer.peer.pipeline.lane import IDLE_S, DownLane, UpLane
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.lifecycle import Lifecycle, LifecycleState
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.protocol.addresses import network_seen
from gossamer.protocol.errors import BadMessage, PeerMisbehaved, RefusalCode, Refused, TransportError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Lane, RunPhase
from gossamer.protocol.messages.terms import BATCHES_AWAY, StageTerms, check_member
from gossamer.protocol.run.invite import Credential
from gossamer.protocol.streams.transport import BESIDE_BYTES, Purpose, Stream, Transport
from gossamer.protocol.tasks import cancel, loop_s, spawn

log = logging.getLogger(__name__)

DOWN_LANES = 4
MOST_UP_LANES = 8
MOST_INBOUND_DOWN_LANES = 4  # beside those that we have opened
LOOK_S = 1.0  # between two looks at which lanes are missing
REDRAW_S = 60.0
UNCALLED_S = 3.0  # without a lane from the stage below, until we open one
CONNECT_S = 15.0
FAREWELL_S = 0.5  # for the last message of each lane, when this peer leaves
REST_S = 600.0  # of a holder whose answers are unlike those of others, or whose micro-batches all others oppose
YOUNG_S = 5.0  # both sides have opened a lane at the same moment: the first one stands


@dataclass(slots=True)
class LaneTimes:
    """One open lane as this module sees it; loop time."""

    is_called: bool  # by us
    opened_s: float
    credential: Credential | None  # that the partner has shown
    answers: int = 0  # that were noted in the address book


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
    groups: SybilGroups
    end: StageEnd
    waiting: HeldShare = field(default_factory=lambda: HeldShare(WAITING_LOOKS))  # own trainer has no micro-batch, though there are lanes
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _times: dict[int, LaneTimes] = field(default_factory=dict)  # by lane
    _greeting: dict[PeerId, bool] = field(default_factory=dict)  # who opens a lane to us now, and whether from the stage below
    _calling: dict[PeerId, bool] = field(default_factory=dict)  # to whom we open one, and whether both have greeted: a bulk stream opens
    _calls: set[asyncio.Task[None]] = field(default_factory=set)
    _redrawn_s: float = 0.0
    _uncalled_s: float = 0.0  # since when no lane from the stage below is open; loop time
    _without_lane: Lasting = field(default_factory=Lasting)  # a neighbouring stage has no lane with us while we train
    _told_steps: int = 0  # the highest global step that the trainer was told since its last step
    _seen_step: int = 0  # the trainer's last reported global step

    @property
    def stage(self) -> StageTerms:
        """The stage that this peer holds."""
        return self.pipeline.carrier.stage

    def apart_s(self) -> float:
        """Return for how long a neighbouring stage has had no lane with us while we train; 0 while all have."""
        return self._without_lane.lasts_s

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

    async def leave(self, grace_s: float) -> None:
        """Begin no hop and accept none, wait for those under way, and end every lane: the neighbours are told. Takes `grace_s` at most."""
        self.pipeline.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s - FAREWELL_S):
                await self.pipeline.changes.until(lambda: self.pipeline.carrier.is_quiet)
        ends = [open_lane.writing for open_lane in self.pipeline.lanes.values()]
        for open_lane in list(self.pipeline.lanes.values()):
            self.pipeline.end_lane(open_lane, "leaving", is_over=self.lifecycle.finished)
        self.pipeline.stop()  # own hops that came back with the lanes
        if ends:
            await asyncio.wait(ends, timeout=FAREWELL_S)

    def on_clock(self, open_lane: OpenLane, global_step: int) -> None:
        """Note a neighbour's global step, and have own trainer follow one that is ahead, within the largest gap between two partners.

        A higher stage may be ahead by the batches that are under way. No neighbour's step leads to the end of the run.
        """
        self.peer_exchange.book.note_global_step(open_lane.lane.partner, global_step)
        self.peer_exchange.book.note_hop(open_lane.lane.partner, loop_s())
        self._note_answers(open_lane.lane)
        ahead_steps = BATCHES_AWAY if isinstance(open_lane.lane, DownLane) else 0
        global_step = min(global_step - ahead_steps, self.membership.total_steps - 1)
        own_steps = self.lifecycle.global_step
        is_near = own_steps < global_step <= own_steps + self.membership.terms.max_clock_gap_steps
        if is_near and global_step > self._told_steps:
            self._told_steps = global_step
            self.report.follow(max(own_steps, self.pipeline.carrier.global_step), global_step)
            self.link.notify(FollowClock(global_step))

    def on_compared(self, compared: AnswersCompared) -> None:
        """Report what answers to the same micro-batch say of their holders. One whose answers are odd rests."""
        self.report.compare(compared)
        if compared.odd is None or not compared.must_rest:
            return
        self.pipeline.carrier.doubling.forgive(compared.odd)
        self._let_rest(compared.odd, self.report.odd_text(compared.odd, compared), "your answers are unlike those of others")

    def on_opposed(self, opposed: SourceOpposed) -> None:
        """Report a partner below whose micro-batches lead the weights against all others'. Its Sybil group rests."""
        carrier, text = self.pipeline.carrier, self.report.opposed_text(opposed)
        group = carrier.doubling.groups.get(opposed.partner)
        mates = [lane.partner for lane in carrier.up.values() if group and carrier.doubling.groups.get(lane.partner) == group]
        for partner in dict.fromkeys([opposed.partner, *mates]):
            self._let_rest(partner, text, "your micro-batches lead the weights against those of all others")

    def _let_rest(self, partner: PeerId, text: str, reason: str) -> None:
        """End the lanes of a partner, and have none with it for a while."""
        self.peer_exchange.book.rest(partner, loop_s(), REST_S)
        self.report.emit(shunned(partner, text, self.peer_exchange.time.local_s(), REST_S))
        for open_lane in [one for one in self.pipeline.lanes.values() if one.lane.partner == partner]:
            self.pipeline.end_lane(open_lane, reason)

    # ------------------------------------------------------------------ which lanes to have

    def _group_partners(self) -> None:
        """Tell the carrier the Sybil groups of its partners. Where all above, or all below, are one group, each stands for itself."""
        carrier = self.pipeline.carrier
        carrier.doubling.groups = self._apart(carrier.up.values()) | self._apart(carrier.down.values())

    def _apart(self, lanes: Iterable[UpLane | DownLane]) -> dict[PeerId, str]:
        names = self.groups.names([self.peer_exchange.book.get(lane.partner) for lane in lanes])
        is_one = len(set(names.values())) == 1
        return {peer: str(peer) if is_one else name for peer, name in names.items()}

    @property
    def _is_training(self) -> bool:
        return self.lifecycle.may_meet and self.lifecycle.phase is RunPhase.TRAIN and self.link.connected

    def _look(self) -> None:
        carrier = self.pipeline.carrier
        is_training = self._is_training
        self._note_own_step()
        if carrier.may_begin != is_training:
            carrier.may_begin = is_training
            self.pipeline.wake()
        self.report.look(self.pipeline, is_training=is_training)
        has_lanes = carrier.is_complete and bool(carrier.up or self.stage.is_first)
        self._without_lane.look(is_training and not has_lanes)
        if is_training and has_lanes:
            self.waiting.look(not any(hop.is_work for hop in carrier.hops.values()))
        if not is_training:
            self.end.pause(LOOK_S)
            self.waiting.clear()
            self._rest()
            return
        if self.end.look(self.lifecycle.global_step):
            self.link.notify(FollowClock(self.membership.total_steps, is_unlimited=True))
        self._end_unwelcome()
        self._group_partners()
        self._retire()
        num_down = len(self._called_down) + sum(self.peer_exchange.book.get(peer).stage == self._next_stage for peer in self._calling)
        if not self.stage.is_last and num_down < DOWN_LANES:
            self._call(self._next_stage)
        if carrier.up or self.stage.is_first or not carrier.is_complete:
            self._uncalled_s = loop_s()
        elif loop_s() - self._uncalled_s >= UNCALLED_S:
            self._call(self._next_stage - 2)

    def _note_own_step(self) -> None:
        """Let the carrier tell neighbours the step that the trainer has reported.

        The trainer's replies about hops tell a newer one. A step that has become smaller was set back.
        """
        global_step, seen = self.lifecycle.global_step, self._seen_step
        if global_step != seen:
            carrier = self.pipeline.carrier
            carrier.global_step = global_step if global_step < seen else max(carrier.global_step, global_step)
            if global_step < seen:
                self.report.go_back()
            self._seen_step = self._told_steps = global_step
            self.end.note_step()
            self.pipeline.wake()

    def _end_unwelcome(self) -> None:
        """End the lanes of peers that are banned, or no members any more: a lane is checked when it opens, and may stay open for days."""
        book = self.peer_exchange.book
        for open_lane in list(self.pipeline.lanes.values()):
            partner = open_lane.lane.partner
            if book.is_banned(partner, loop_s()):
                self.pipeline.end_lane(open_lane, "you are banned")
                continue
            credential = book.get(partner).credential or self._times[open_lane.lane.number].credential
            try:
                check_member(partner, credential, self.membership.terms, self.peer_exchange.time.now_s())
            except Refused as refusal:
                self.pipeline.end_lane(open_lane, refusal.detail)

    def _rest(self) -> None:
        """End the lanes of a peer whose trainer takes no hops now: its neighbours look elsewhere."""
        is_idle = self.pipeline.carrier.is_quiet and not self.pipeline.lanes
        if not is_idle and self.lifecycle.state is not LifecycleState.LEAVING:
            is_over = self.lifecycle.finished
            self.pipeline.rest("the run has ended here" if is_over else "not training now", is_over=is_over)

    @property
    def _next_stage(self) -> int:
        """The next stage, counted from one."""
        return self.stage.stage + 2

    @property
    def _called_down(self) -> list[DownLane]:
        """The lanes to the next stage that we have opened."""
        return [lane for lane in self.pipeline.carrier.down.values() if self._times[lane.number].is_called]

    def _retire(self) -> None:
        """Draw a lane anew each minute, if there are other holders; a lane ends when its last hop is answered."""
        called, now_s = self._called_down, loop_s()
        if len(called) >= DOWN_LANES and now_s - self._redrawn_s >= REDRAW_S and self._candidates(self._next_stage):
            self._redrawn_s = now_s
            self.rng.choice(called).rests_until_s = math.inf
        for open_lane in [self.pipeline.lanes[lane.number] for lane in called if lane.rests_until_s == math.inf and lane.is_quiet]:
            self.pipeline.end_lane(open_lane, "redrawn")

    def _candidates(self, stage: int) -> list[KnownPeer]:
        """Return the live holders of a stage, counted from one, to whom a lane may be opened now."""
        now_s = loop_s()
        taken = self._calling.keys() | {open_lane.lane.partner for open_lane in self.pipeline.lanes.values()}
        holders = self.peer_exchange.book.holders(stage, now_s)
        return [entry for entry in holders if entry.peer_id not in taken and entry.callable_s <= now_s]

    def _call(self, stage: int) -> None:
        candidates = self._candidates(stage)
        if candidates:
            entry = self.rng.choice(self.rng.choice(self.groups.group(candidates)))
            self._calling[entry.peer_id] = False
            spawn(self._open(entry, stage), self._calls, f"lane to {entry.peer_id.short()}")

    async def _open(self, entry: KnownPeer, stage: int) -> None:
        book, partner, began_s = self.peer_exchange.book, entry.peer_id, loop_s()
        stream: Stream | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                stream = await self.transport.connect(partner, entry.addresses, Purpose.PASS)
            own = self._own_side(partner)
            theirs = await own.open(stream, stage, self.rng)
            if self.stage.value_bytes >= BESIDE_BYTES:
                self._calling[partner] = True
                await stream.open_bulk()
            self._calling.pop(partner, None)
            await self._carry(stream, theirs, own.window, is_called=True)
        except Refused as refusal:
            if refusal.code is not RefusalCode.LEAVING:
                book.note_answer(partner, loop_s())
            if refusal.code in (RefusalCode.NOT_READY, RefusalCode.WRONG_PHASE):
                book.note_not_ready(partner, loop_s(), finished=refusal.code is RefusalCode.WRONG_PHASE)
            else:
                book.note_refusal(partner, loop_s())
            self.report.refused(stage, refusal)
        except PeerMisbehaved as error:
            book.ban(partner, loop_s(), str(error))
        except (TransportError, TimeoutError):
            book.note_failure(partner, loop_s(), loop_s() - began_s)
        finally:
            self._calling.pop(partner, None)
            if stream is not None:
                stream.close()

    # ------------------------------------------------------------------ who opens one to us

    async def answer(self, stream: Stream) -> None:
        """Serve an inbound `Pass` stream until it ends. Raises Refused and PeerMisbehaved for the partner, TransportError."""
        first = await stream.receive()
        if not isinstance(first, Lane):
            raise BadMessage(f"a lane begins with a Lane, not with a {type(first).__name__}")
        own = self._own_side(stream.partner)
        own.check(stream, first)
        self._need_room(stream, first)
        self._greeting[stream.partner] = self._is_from_below(first)
        try:
            await own.answer(stream, first, self.rng)
        finally:
            del self._greeting[stream.partner]
        await self._carry(stream, first, own.window, is_called=False)

    def _need_room(self, stream: Stream, first: Lane) -> None:
        """Raise Refused unless we may carry hops with a holder now. An older lane of the same holder has broken, and ends."""
        carrier, is_from_below, partner = self.pipeline.carrier, self._is_from_below(first), stream.partner
        if (code := self.lifecycle.refusal) is not None:
            raise Refused(code)
        if is_from_below and not carrier.is_complete:
            raise Refused(RefusalCode.NOT_READY, f"nobody holds {self.stage.name_of(self._next_stage)}")
        entry = self.peer_exchange.book.get(partner)
        if entry.welcome_s > loop_s():  # turns are those of meetings, with mates
            raise Refused(RefusalCode.BUSY, "not yet again, after a failed lane with you")
        own = [open_lane for open_lane in self.pipeline.lanes.values() if open_lane.lane.partner == partner]
        is_young = any(loop_s() - self._times[one.lane.number].opened_s < YOUNG_S for one in own)
        if is_young or partner in self._greeting or self._calling.get(partner):
            raise Refused(RefusalCode.BUSY, "there is a lane between us")
        for open_lane in own:
            self.pipeline.end_lane(open_lane, "replaced by a newer lane")
        newcomer = replace(entry, network=network_seen(stream.observed))
        lanes = list(carrier.up) if is_from_below else [number for number in carrier.down if not self._times[number].is_called]
        self._make_room(newcomer, lanes, MOST_UP_LANES if is_from_below else MOST_INBOUND_DOWN_LANES, is_from_below=is_from_below)

    def _make_room(self, newcomer: KnownPeer, lanes: list[int], most: int, *, is_from_below: bool) -> None:
        """Raise Refused unless one more lane fits, or one can end: of the largest Sybil group the one that is idle longest.

        One that carries hops ends only where its group has more lanes than the newcomer's would have: identities are free.
        """
        if len(lanes) + list(self._greeting.values()).count(is_from_below) < most:
            return
        there = [self.pipeline.lanes[number] for number in lanes if number in self.pipeline.lanes]
        sizes = self._group_sizes([*(self.peer_exchange.book.get(one.lane.partner) for one in there), newcomer])
        idle = [one for one in there if not one.lane.unanswered and loop_s() - self._active_s(one) >= IDLE_S]
        crowded = [one for one in there if sizes[one.lane.partner] > sizes[newcomer.peer_id]]
        if not idle and not crowded:
            raise Refused(RefusalCode.BUSY, "as many lanes as I allow")
        longest = min(idle or crowded, key=lambda one: (-sizes[one.lane.partner], self._active_s(one)))
        self.pipeline.end_lane(longest, "others want a lane")

    def _group_sizes(self, entries: Sequence[KnownPeer]) -> dict[PeerId, int]:
        """Return how many of these peers each one's Sybil group has; where all are one group, how many are in its network."""
        groups = self.groups.group(entries)
        if len(groups) == 1:
            places = Counter(entry.place for entry in entries)
            return {entry.peer_id: places[entry.place] for entry in entries}
        return {entry.peer_id: len(group) for group in groups for entry in group}

    def _active_s(self, one: OpenLane) -> float:
        """Return when a lane was opened, or carried its last hop or answer."""
        return max(self._times[one.lane.number].opened_s, one.lane.active_s)

    def _is_from_below(self, first: Lane) -> bool:
        return first.opening.stage < self._next_stage - 1

    # ------------------------------------------------------------------ one lane

    def _own_side(self, partner: PeerId) -> LaneSide:
        exchange, lifecycle = self.peer_exchange, self.lifecycle
        window = self.pipeline.carrier.window
        records = exchange.records_for(partner)
        return LaneSide(self.membership, lifecycle.global_step, lifecycle.phase, window, records, exchange.time.now_s())

    async def _carry(self, stream: Stream, theirs: Lane, window: int, *, is_called: bool) -> None:
        """Carry hops on a lane whose sides have greeted each other, and learn from how it ends. `window`: what our own Lane granted."""
        number, partner, book = next(self._numbers), stream.partner, self.peer_exchange.book
        book.note_call(partner, loop_s(), theirs.global_step)
        book.shows(partner, theirs.opening.credential)
        book.connected(partner, stream.observed)
        book.note_answer(partner, loop_s())
        self.peer_exchange.take_all(theirs.opening.records)
        self._times[number] = LaneTimes(is_called, loop_s(), theirs.opening.credential)
        lane = self._lane(number, partner, theirs, window)
        try:
            end = await self.pipeline.carry(stream, lane)
        finally:
            self._note_answers(lane)
            del self._times[number]
        self._learn(partner, end)
        if end.fault is not None:
            raise end.fault

    def _note_answers(self, lane: UpLane | DownLane) -> None:
        """Note in the address book that hops were answered on a lane since the last call."""
        times = self._times[lane.number]
        if lane.answers > times.answers:
            times.answers = lane.answers
            self.peer_exchange.book.note_carried(lane.partner, loop_s())

    def _lane(self, number: int, partner: PeerId, theirs: Lane, window: int) -> UpLane | DownLane:
        if self._is_from_below(theirs):
            return UpLane(number, partner, window)
        return DownLane.opened(number, partner, theirs.window, self.stage, self.peer_exchange.book.get(partner).typical_s)

    def _learn(self, partner: PeerId, end: CloseLane) -> None:
        book = self.peer_exchange.book
        if end.silent_s:
            book.note_broken_meeting(partner, loop_s(), end.silent_s)
        elif end.fault is None:
            book.note_not_ready(partner, loop_s(), finished=end.is_over and not self.lifecycle.finished)
