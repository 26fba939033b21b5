"""A staged run's part of a node: the choice of the stage to hold, and the objects that carry hops. Loaded in staged runs only."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from gossamer.peer.machine.events import Event, StageHeld
from gossamer.peer.machine.held_stage import held_stage
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.meeting.driver import OwnSide
from gossamer.peer.meeting.line import Line
from gossamer.peer.node.carrying import Carrying
from gossamer.peer.node.mates import Mates
from gossamer.peer.node.rebalancing import Rebalancing
from gossamer.peer.node.stage_end import StageEnd
from gossamer.peer.node.stage_report import StageReport
from gossamer.peer.node.ward import Ward
from gossamer.peer.pipeline.carrier import Carrier
from gossamer.peer.pipeline.driver import Pipeline
from gossamer.peer.pipeline.hop import hop_numbers
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.presence import Presence
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.peer.sync.line_rate import slower_rate
from gossamer.peer.sync.sources import Sources, spread_over
from gossamer.protocol.identity import PeerId
from gossamer.protocol.streams.transport import Transport
from gossamer.protocol.tasks import loop_s

PROBED = 3  # peers, at most
PROBE_S = 10.0  # for the echoes of one
PROBE_AGAIN_S = 30.0  # where none has answered
RECONSIDER_S = (2.0, 12.0)  # a choice is announced and looked at again after a random time: peers that join together choose unlike stages
FIRST_LOOK_S = 5.0  # for the directory to show who holds which stage


@dataclass(slots=True)
class StageChoice:
    """Chooses the stage that a peer holds: the one of its last start, or the one with the fewest Sybil groups, then the fewest holders."""

    home: Home
    groups: SybilGroups
    presence: Presence
    lifecycle: Lifecycle
    rng: random.Random
    num_stages: int  # of the run
    emit: Callable[[Event], None]
    is_founder: bool = False
    _shown: int = 0  # the stage that was emitted last, counted from one

    def show_held(self) -> None:
        """Announce the stage of the last start, or of a move since, before the trainer is there. Raises BadSettings as `choose`."""
        held = held_stage(self.home)
        if held is not None and held <= self.num_stages:
            self._hold(held)

    async def choose(self, stages: tuple[int, ...]) -> int:
        """Choose one of the stages that fit, from 0, and keep the choice in the home. Raises BadSettings if that is unreadable."""
        chosen = (held_stage(self.home) or 0) - 1
        if chosen not in stages:
            await self.presence.first_look(FIRST_LOOK_S)
            chosen = await self._reconsidered(min(stages, key=self._need), stages)
            write_whole(self.home.stage, f"{chosen + 1}\n".encode())
        self._hold(chosen + 1)
        return chosen

    def _hold(self, stage: int) -> None:
        self.lifecycle.hold(stage)
        if stage != self._shown:
            self._shown = stage
            self.emit(StageHeld(stage, self.num_stages))

    async def _reconsidered(self, first: int, stages: tuple[int, ...]) -> int:
        """Announce a choice, and return it, or a stage that has fewer other holders by then.

        A peer that joins has other members beside it, even if the directory shows none yet.
        """
        if len(stages) == 1 or (self.is_founder and not self.groups.book.announced(loop_s())):
            return first
        self.lifecycle.hold(first + 1)
        await asyncio.sleep(self.rng.uniform(*RECONSIDER_S))
        await self.presence.look_now(FIRST_LOOK_S)
        better = min(stages, key=self._need)
        return better if self._need(better)[:2] < self._need(first)[:2] else first

    def _need(self, stage: int) -> tuple[int, int, float]:
        """Return how little a stage needs one more holder."""
        book, now_s = self.groups.book, loop_s()
        holders = book.claimed(stage + 1, now_s)
        return len(self.groups.group(holders)), len(holders), stage if self.is_founder else self.rng.random()


async def probe_line(sources: Sources, line: Line, pipeline: Pipeline) -> None:
    """Measure the line with a few peers, until one answers: what share of the device it can feed follows. The fastest one counts."""

    def carried() -> int:
        return max(pipeline.carried_bytes())

    while not line.probed_bytes_per_s:
        known = sources.book.everybody(loop_s())
        for peer in spread_over(sources.groups.group(known))[:PROBED]:  # one after the other: they share the line
            rate = await sources.ask(peer, lambda source: slower_rate(source, PROBE_S, carried), 2 * PROBE_S)
            if isinstance(rate, float):
                line.probed_bytes_per_s = max(line.probed_bytes_per_s, rate)
        await asyncio.sleep(PROBE_AGAIN_S)


def make_staged_parts(
    home: Home,
    own: OwnSide,
    membership: Membership,
    lifecycle: Lifecycle,
    exchange: PeerExchange,
    transport: Transport,
    own_sources: Sources,
    rng: random.Random,
    emit: Callable[[Event], None],
    gave_weights: Callable[[PeerId, float], bool],
) -> tuple[Carrying, Ward]:
    """Make what carries the hops of a peer that holds a stage, and what keeps a copy of the next stage.

    `membership` is on terms that hold the stage, and `own_sources` asks as a holder of it. `gave_weights` returns whether a peer has had
    weights of ours since a moment; loop time.
    """
    stage, groups, fits = membership.terms.stage, own_sources.groups, own.link.fits
    assert stage is not None
    report = StageReport(stage, exchange.book, emit, gave_weights)
    pipeline = Pipeline(
        Carrier(stage, rng, hop_numbers(rng)),
        own.link,
        own.payloads,
        report.count,
        lambda lane, global_step: carrying.on_clock(lane, global_step),
        lambda compared: carrying.on_compared(compared),
        lambda opposed: carrying.on_opposed(opposed),
    )
    end = StageEnd(pipeline.carrier, exchange.book, groups, membership.total_steps, membership.terms.max_clock_gap_steps)
    carrying = Carrying(membership, lifecycle, transport, exchange, pipeline, own.link, rng, report, groups, end)
    mates = Mates(membership, lifecycle, own_sources)
    rebalancing = Rebalancing(mates, fits, carrying.waiting, exchange.time.now_s, rng)
    next_sources = Sources(replace(own_sources.client, stage=membership.terms.own_stage % stage.count + 1), groups, rng)
    return carrying, Ward(home, membership, lifecycle, next_sources, mates, rebalancing, fits, rng, emit)
