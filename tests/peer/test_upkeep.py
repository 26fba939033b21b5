"""Upkeep: a founder begins by itself, and who has fallen behind takes over newer weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

from peer.meeting_events import Finish, MeetingOver
from peer.upkeep import OUTCAST
from protocol.messages import RefusalCode
from tests.swarm.mallory import MALLORY
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})
TOO_FAR = Finish(MeetingOver.REFUSED, "too far", RefusalCode.CLOCK_TOO_FAR)


def test_a_founder_begins_once_its_company_is_there(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        founder = swarm.add(told_to_start=True, wait_for_peers=1).start()
        await asyncio.sleep(30.0)
        assert not founder.trainer.started and "waiting for peers" in founder.said[-2].get("reason", founder.said[-1].get("reason", ""))
        swarm.add(told_to_start=True, is_founder=False).start()
        await swarm.until(lambda: all(peer.trainer.started for peer in swarm.peers), within_s=30.0)

    play(Swarm(tmp_path, manifest=QUIET), story)


async def two_clocks(swarm: Swarm, gap_steps: int) -> tuple[Peer, Peer]:
    """One that is so many steps ahead, and one that stands at the start; both stand still."""
    elder = swarm.add().start()
    await swarm.until(lambda: elder.clock >= gap_steps)
    elder.trainer.frozen = True
    await asyncio.sleep(1.5)
    straggler = swarm.add()
    straggler.trainer.frozen = True
    return elder, straggler.start()


def test_only_who_is_further_behind_than_the_run_allows_takes_over_weights(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        far, near = swarm.manifest.outer.max_clock_gap_steps + 5, 20
        elder, straggler = await two_clocks(swarm, near)
        await asyncio.sleep(60.0)
        assert straggler.clock == 0, "its own weights were good enough"
        elder.trainer.frozen = False
        await swarm.until(lambda: elder.clock >= far)
        elder.trainer.frozen = True
        await swarm.until(lambda: straggler.clock == elder.clock, within_s=60.0)
        assert bool((straggler.slow == elder.slow).all())

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_row_of_refusals_is_forgotten_at_a_meeting_that_counts(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (peer,) = swarm.start(1)
        upkeep = peer.node._upkeep
        for _ in range(OUTCAST - 1):
            upkeep.on_meeting(MALLORY.peer_id, TOO_FAR)
        assert upkeep._useful_clock() is None
        upkeep.on_meeting(MALLORY.peer_id, Finish(MeetingOver.COMPLETED, ""))
        upkeep.on_meeting(MALLORY.peer_id, TOO_FAR)
        assert upkeep._useful_clock() is None
        for _ in range(OUTCAST - 1):
            upkeep.on_meeting(MALLORY.peer_id, TOO_FAR)
        clock_steps = upkeep._useful_clock()
        assert clock_steps is not None and clock_steps > peer.clock, "only a donor that is further than we are"

    play(Swarm(tmp_path, manifest=QUIET), story)
