"""Swarms whose inner steps last ten seconds, as long as a partner that is called bears silence."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Swarm, play

STEP_S = 10.0
SPEEDS = (1.0, 1.03, 0.97, 1.01)  # no two are in step
ROUND_S = 900.0


async def train(swarm: Swarm, **special: Any) -> Counter[str]:
    """Train for a quarter of an hour; return how calls ended, and what was said of those that came to nothing."""
    for speed in SPEEDS:
        swarm.add(step_s=speed * STEP_S, **special).start()
    await asyncio.sleep(ROUND_S)
    for peer in swarm.peers:
        assert not list(peer.payloads.path("x").parent.iterdir()) or peer.node.meetings.active, "files are left behind"
    return Counter(
        done.outcome if done.outcome == "completed" else f"{done.outcome}: {done.reason}" for p in swarm.peers for done in p.meetings
    )


def test_calls_are_answered_while_a_gradient_is_computed(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        ends = await train(swarm, optimizer_s=1.0)
        assert ends["completed"] > 100 and ends.total() - ends["completed"] <= ends["completed"] / 10, ends
        assert not [end for end in ends if end.startswith(("failed", "abandoned"))], ends

    play(Swarm(tmp_path, manifest=tiny_manifest(outer={"inner_steps": 4, "deadline_s": 30.0})), story)


def test_a_peer_that_answers_between_steps_only_calls_at_a_step_boundary(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        ends = await train(swarm)
        assert ends["completed"] > 100, ends
        assert not [end for end in ends if end.startswith(("failed", "abandoned"))], ends

    play(Swarm(tmp_path, manifest=tiny_manifest(outer={"inner_steps": 4, "deadline_s": 120.0})), story)
