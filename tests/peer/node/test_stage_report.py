"""What the operator of a holder is told: why its trainer has no work, its lanes, and who holds the stages."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from gossamer.peer.machine.events import Event, HopsCarried, PipelineSeen, ProcessReported, StepsLost, Warned
from gossamer.peer.machine.states import CARRYING, CUT_OFF, IDLE, PAUSED, REFUSED, STARVED, WITHOUT_WORK
from gossamer.peer.node.stage_report import CLAIM_S, HOPS_S, MISSING_S, ONLY_S, WORKLESS_S, StageReport
from gossamer.peer.pipeline.carrier import Carrier
from gossamer.peer.pipeline.commands import HopOutcome, HopOver
from gossamer.peer.pipeline.driver import Pipeline
from gossamer.peer.pipeline.hop import Away, Hop, HopSource, HopState
from gossamer.peer.pipeline.lane import DownLane, UpLane
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.protocol.errors import RefusalCode, Refused
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.limits import RECORD_NEWS_S
from gossamer.protocol.messages.terms import StageTerms
from tests.peer.swarm.test_address_book_stages import book_of

LAST = Identity(b"l" * 32).peer_id


@dataclass
class Scene:
    """A middle holder's report, its carrier's lanes and hops, and what it has emitted."""

    stages: list[int]  # that the peers in sight hold
    own: int = 1  # from 0
    events: list[Event] = field(default_factory=list)
    down: dict[int, DownLane] = field(default_factory=dict)
    up: dict[int, UpLane] = field(default_factory=dict)
    hops: dict[int, Hop] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)  # stages whose holders give no sign

    def __post_init__(self) -> None:
        self.book = book_of(self.stages, own=self.own + 1)
        self.given: set[PeerId] = set()  # who has had weights of ours
        terms = StageTerms(self.own, 3, 40, 60, 4)
        self.report = StageReport(terms, self.book, self.events.append, lambda peer, since_s: peer in self.given)

    def look(self, silent: KnownPeer | None = None, silent_s: float = 0.0) -> None:
        """Look after a sign of everybody, but one peer that was seen last at another time."""
        now_s = asyncio.get_running_loop().time()
        for entry in self.book.known(0.0):
            if entry.stage not in self.silent:
                entry.seen_s = silent_s if entry is silent else now_s
        carrier = Carrier(self.report.stage, random.Random(0), itertools.count(1))
        carrier.up, carrier.down, carrier.hops, carrier.num_late = self.up, self.down, self.hops, 3
        nothing: Any = None  # neither trainer nor files are used
        pipeline = Pipeline(
            carrier, nothing, nothing, self.report.count, lambda lane, global_step: None, lambda compared: None, lambda opposed: None
        )
        self.report.look(pipeline, is_training=True)

    async def look_for(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.look()
            await asyncio.sleep(1.0)

    @property
    def told(self) -> ProcessReported:
        return [event for event in self.events if isinstance(event, ProcessReported)][-1]


def lane_to(stage: int, number: int = 1) -> DownLane:
    lane = DownLane(number, LAST, window=4)
    lane.note_answer(2.5, 0.0)
    return lane


async def test_a_stage_that_nobody_holds_and_holders_that_refuse_are_told_apart() -> None:
    nobody, refused = Scene([1]), Scene([1, 3])
    refused.report.refused(3, Refused(RefusalCode.BUSY, "as many lanes as I allow"))
    for scene in (nobody, refused):
        scene.up[9] = UpLane(9, LAST, 2)
        await scene.look_for(MISSING_S + 2)
    assert (nobody.told.state, nobody.told.reason) == (STARVED, "no holder of stage 3 of 3 is in reach")
    assert refused.told.state == REFUSED
    assert refused.told.reason == ("no holder of stage 3 of 3 carries hops with this peer, the last one said: as many lanes as I allow")


@pytest.mark.parametrize("dead", [{1, 2, 3}, {2}])
async def test_the_last_holder_of_a_stage_is_warned_unless_it_hears_nobody(dead: set[int]) -> None:
    """Its own line may be down: then the others may be there."""
    scene = Scene([1, 2, 3])
    scene.down[1], scene.up[9] = lane_to(3), UpLane(9, LAST, 2)
    await scene.look_for(5.0)
    scene.silent = dead
    for entry in scene.book.known(0.0):
        entry.failures = int(entry.stage in dead)
    if len(dead) > 1:
        scene.down.clear()
        scene.up.clear()
    await scene.look_for(ONLY_S + MISSING_S + 5.0)
    warned = [event.words for event in scene.events if isinstance(event, Warned)]
    assert len(warned) == (len(dead) == 1)
    if len(dead) > 1:
        assert (scene.told.state, scene.told.reason) == (STARVED, "no holder of stage 3 of 3 is in reach, last seen 1 min ago")
        await scene.look_for(RECORD_NEWS_S - ONLY_S)
        reason = "no other peer is in reach, last seen 2 min ago: this peer's line may be down, or all others are"
        assert (scene.told.state, scene.told.reason) == (CUT_OFF, reason)


async def test_paused_holders_are_named_with_the_way_out() -> None:
    scene = Scene([1, 3, 3])
    scene.up[9] = UpLane(9, LAST, 2)
    for entry in scene.book.known(0.0):
        entry.paused = entry.stage == 3
    await scene.look_for(MISSING_S + 2)
    names = [entry.peer_id.short() for entry in scene.book.known(0.0) if entry.stage == 3]
    assert (scene.told.state, scene.told.reason) == (PAUSED, f"the holders of stage 3 of 3 are paused, or just start: {', '.join(names)}")
    assert "trains again" in WITHOUT_WORK[PAUSED]


async def test_the_last_stage_waits_for_the_lower_one_alone() -> None:
    scene = Scene([2, 2], own=2)
    lane = scene.up[9] = UpLane(9, LAST, 2)
    scene.hops[5] = Hop(5, b"name", HopSource(lane, 1), HopState.ARRIVING)
    await scene.look_for(WORKLESS_S + 2)
    assert (scene.told.state, scene.told.reason) == (IDLE, "no work for 15 s: no micro-batch comes from stage 2")


async def test_a_trainer_without_work_is_told_where_the_micro_batches_are() -> None:
    scene = Scene([1, 3])
    scene.down[1], scene.up[9] = lane_to(3), UpLane(9, LAST, 2)
    await scene.look_for(WORKLESS_S + 2)
    assert (scene.told.state, scene.told.reason) == (IDLE, "no work for 15 s: no micro-batch comes from stage 1")
    lane = scene.down[1]
    sent_s = asyncio.get_running_loop().time()
    scene.hops[5] = Hop(5, b"name", None, HopState.AWAY, away=Away(lane, lane.send(5), sent_s))
    await scene.look_for(7)
    assert "stage 3 has not answered 1 micro-batch, the oldest for 5 s" in scene.told.reason
    scene.hops[5].state, scene.hops[5].away = HopState.BACKWARD, None
    await scene.look_for(2)
    assert (scene.told.state, scene.told.reason) == (CARRYING, "")


async def test_work_now_and_then_is_no_lack_of_work() -> None:
    scene = Scene([1, 3])
    scene.down[1], scene.up[9] = lane_to(3), UpLane(9, LAST, 2)
    for _ in range(5):
        await scene.look_for(WORKLESS_S - 3)
        scene.report.count(HopOver(1, HopOutcome.ANSWERED, 1))
    assert not [event for event in scene.events if isinstance(event, ProcessReported)]


async def test_holders_that_nothing_is_heard_of_are_counted_apart() -> None:
    scene = Scene([1, 1, 3])
    silent = scene.book.known(0.0)[0]
    await asyncio.sleep(2 * RECORD_NEWS_S)
    for seconds, holders, unheard in ((RECORD_NEWS_S, (2, 1, 1), (0, 0, 0)), (RECORD_NEWS_S + 1, (1, 1, 1), (1, 0, 0))):
        seen_s = asyncio.get_running_loop().time() - seconds
        scene.look(silent, seen_s)
        await asyncio.sleep(HOPS_S)
        scene.look(silent, seen_s + HOPS_S)
        (*_, seen) = [event for event in scene.events if isinstance(event, PipelineSeen)]
        assert (seen.holders, seen.unheard) == (holders, unheard)
    silent.failures = 1
    await asyncio.sleep(HOPS_S)
    scene.look(silent, 0.0)
    (*_, seen) = [event for event in scene.events if isinstance(event, PipelineSeen)]
    assert (seen.holders, seen.unheard) == ((1, 1, 1), (0, 0, 0))


@pytest.mark.parametrize(
    ("stages", "checkpoint", "others", "lost"),
    [([1, 3], 480, 500, 1), ([1, 3], 0, 500, 0), ([1, 3], 496, 500, 0), ([1, 2, 3], 480, 500, 0)],
)
async def test_steps_of_an_only_copy_are_reported(stages: list[int], checkpoint: int, others: int, lost: int) -> None:
    """Not those of a run that begins, not those under way, and none that another holder has."""
    scene = Scene(stages)
    scene.look()
    scene.report.follow(checkpoint, others)
    await scene.look_for(2 * CLAIM_S)
    assert [event for event in scene.events if isinstance(event, StepsLost)] == lost * [StepsLost(checkpoint, others)]


@pytest.mark.parametrize("takes_after_s", [0.0, CLAIM_S + 30.0])
async def test_a_newcomer_that_takes_our_weights_hides_no_lost_steps(takes_after_s: float) -> None:
    scene = Scene([1, 2, 3])
    (newcomer,) = scene.book.claimed(2, 10.0)
    newcomer.global_step = 0
    scene.report.follow(480, 500)
    await scene.look_for(takes_after_s)
    scene.given.add(newcomer.peer_id)
    newcomer.global_step = 500
    await scene.look_for(max(5.0, CLAIM_S + 10.0 - takes_after_s))
    scene.look()
    assert [event for event in scene.events if isinstance(event, StepsLost)] == [StepsLost(480, 500)]


async def test_steps_that_a_trainer_follows_in_parts_are_counted_once() -> None:
    """Its clock follows more slowly than neighbours tell theirs. After a return to a checkpoint the same steps are lost again."""
    scene = Scene([1, 3])
    for own_steps, global_step in ((480, 482), (480, 500), (490, 501), (500, 502)):
        scene.report.follow(own_steps, global_step)
    await scene.look_for(2 * CLAIM_S)
    scene.report.go_back()
    scene.report.follow(480, 502)
    await scene.look_for(2 * CLAIM_S)
    lost = [event.after - event.checkpoint for event in scene.events if isinstance(event, StepsLost)]
    assert lost == [500 - 482, 502 - 480]


async def test_lanes_and_holders_are_reported_when_they_change() -> None:
    scene = Scene([1, 1, 3])
    scene.down[1], scene.up[9] = lane_to(3), UpLane(9, LAST, 2, last=6)
    scene.report.count(HopOver(1, HopOutcome.DECLINED, 3))
    await scene.look_for(3 * HOPS_S)
    (seen,) = [event for event in scene.events if isinstance(event, PipelineSeen)]
    above, below = seen.lanes
    assert (above.stage, above.usual_s, above.window, above.hops) == (3, 2.5, 4, 0)
    assert (below.stage, below.usual_s, below.window, below.hops) == (1, None, 2, 6)
    assert seen.holders == (2, 1, 1), "this peer is one of them"
    (hops,) = [event for event in scene.events if isinstance(event, HopsCarried)]
    assert (hops.repeated, hops.late, hops.outcomes) == (2, 3, {"declined": 1})


async def test_lanes_that_have_ended_are_told_without_another_hop() -> None:
    scene = Scene([1, 1, 3])
    scene.down[1], scene.up[9] = lane_to(3), UpLane(9, LAST, 2, last=6)
    await scene.look_for(2 * HOPS_S)
    scene.up.clear()
    await scene.look_for(2 * HOPS_S)
    assert [event.lanes_below for event in scene.events if isinstance(event, HopsCarried)] == [1, 0]
