"""A meeting's task is cancelled at every event that its machine meets, on either side: dropped or applied, and never half."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gossamer.peer.meeting.commands import Command
from tests.swarm.tiny import tiny_manifest
from tests.swarm.trials import FRAGMENT
from tests.swarm.world import Swarm, play


async def meet(swarm: Swarm, victim: int, at_event: int) -> tuple[bool, bool, int]:
    """Hold one meeting, with one side's task cancelled at its n-th event; tell who applied it, and how many events there were."""
    a, b = swarm.start(2)
    for peer in (a, b):
        peer.trainer.frozen = True
    await asyncio.sleep(1.0)
    a.book.add_address(b.peer_id, "/ip4/192.0.2.1/tcp/4001", 0.0)
    before = a.hash, b.hash
    meeting = asyncio.create_task(a.node.meetings.try_next(FRAGMENT, set()), name="try_next")
    peer = (a, b)[victim]
    await swarm.until(lambda: peer.node.meetings.active)
    (active,) = peer.node.meetings.active.values()
    task = meeting if victim == 0 else next(t for t in asyncio.all_tasks() if t.get_name() == f"{b.peer_id.short()} Meet")
    num_events = 0
    handle = active.meeting.handle

    def counted(event: Any) -> list[Command]:
        nonlocal num_events
        num_events += 1
        if num_events == at_event:
            task.cancel()
        return handle(event)

    active.meeting.handle = counted
    await asyncio.sleep(45.0)
    for each in (a, b):
        assert not each.node.meetings.active
        assert all(fragment.meeting is None for fragment in each.trainer.replica.fragments), "a fragment stays locked"
        assert not list(each.payloads.path("x").parent.iterdir()), "files are left behind"
    assert a.trainer.applied.total() <= 1 and b.trainer.applied.total() <= 1
    applied = a.hash != before[0], b.hash != before[1]
    assert applied == (bool(a.trainer.applied), bool(b.trainer.applied))
    assert await a.node.searches.search(FRAGMENT), "the two meet no more"
    return *applied, num_events


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("codec", ["int8", "modulo4"])
def test_both_have_the_meeting_or_neither(tmp_path: Path, victim: int, codec: str) -> None:
    outcomes: Counter[tuple[bool, bool]] = Counter()

    def cancelled_at(at_event: int) -> bool:
        """Play it; return whether there were so many events at all."""
        num_events = 0

        async def story(swarm: Swarm) -> None:
            nonlocal num_events
            first, second, num_events = await meet(swarm, victim, at_event)
            outcomes[first, second] += 1

        play(Swarm(tmp_path / str(at_event), manifest=tiny_manifest(codec={"name": codec})), story)
        return num_events >= at_event

    at_event = 1
    while cancelled_at(at_event):
        at_event += 1
    assert outcomes[False, False] >= 4 and outcomes[True, True] >= 1
    assert not outcomes[False, True], "the responder counts what the initiator dropped"
    assert outcomes[True, False] <= (2 if victim else 0), "only a responder that is cancelled before it hears the decision misses it"
