"""A staged run's part of a node: the choice of the stage to hold, and the objects that carry hops. Loaded in staged runs only."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from gossamer.peer.machine.events import Event
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.meeting.driver import OwnSide
from gossamer.peer.node.carrying import Carrying
from gossamer.peer.node.stage_report import StageReport
from gossamer.peer.pipeline.carrier import Carrier
from gossamer.peer.pipeline.driver import Pipeline
from gossamer.peer.pipeline.hop import hop_numbers
from gossamer.peer.swarm.address_book import loop_s
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.presence import Presence
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.streams.transport import Transport

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

    async def choose(self, stages: tuple[int, ...]) -> int:
        """Choose one of the stages that fit, from 0, and keep the choice in the home. Raises BadSettings if that is unreadable."""
        chosen = self._kept()
        if chosen not in stages:
            await self.presence.first_look(FIRST_LOOK_S)
            chosen = await self._reconsidered(min(stages, key=self._need), stages)
            write_whole(self.home.stage, f"{chosen + 1}\n".encode())
        self.lifecycle.hold(chosen + 1)
        return chosen

    async def _reconsidered(self, first: int, stages: tuple[int, ...]) -> int:
        """Announce a choice, and return it, or a stage that has fewer other holders by then."""
        if len(stages) == 1 or not self.groups.book.announced(loop_s()):
            return first
        self.lifecycle.hold(first + 1)
        await asyncio.sleep(self.rng.uniform(*RECONSIDER_S))
        better = min(stages, key=self._need)
        return better if self._need(better)[:2] < self._need(first)[:2] else first

    def _need(self, stage: int) -> tuple[int, int, float]:
        """Return how little a stage needs one more holder."""
        book, now_s = self.groups.book, loop_s()
        holders = book.claimed(stage + 1, now_s)
        is_known = bool(book.announced(now_s))
        return len(self.groups.group(holders)), len(holders), self.rng.random() if is_known else stage

    def _kept(self) -> int:
        """Return the stage of the last start; -1 if there was none."""
        if not self.home.stage.exists():
            return -1
        text = self.home.stage.read_text().strip()
        if not text.isdecimal() or not int(text):
            raise BadSettings(
                f"{self.home.stage} does not hold the number of a stage", hint="remove it: the peer then chooses a stage again"
            )
        return int(text) - 1


def make_carrying(
    own: OwnSide,
    membership: Membership,
    lifecycle: Lifecycle,
    exchange: PeerExchange,
    transport: Transport,
    rng: random.Random,
    emit: Callable[[Event], None],
) -> Carrying:
    """Make what carries the hops of a peer that holds a stage. `membership` is on terms that hold the stage."""
    stage = membership.terms.stage
    assert stage is not None
    report = StageReport(stage, exchange.book, emit)
    pipeline = Pipeline(
        Carrier(stage, rng, hop_numbers(rng)),
        own.link,
        own.payloads,
        report.count,
        lambda lane, global_step: carrying.on_clock(lane, global_step),
        lambda compared: carrying.on_compared(compared),
    )
    groups = SybilGroups(exchange.book, membership.terms)
    carrying = Carrying(membership, lifecycle, transport, exchange, pipeline, own.link, rng, report, groups)
    return carrying
