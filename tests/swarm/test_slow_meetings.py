"""Members whose meetings take long hold the fragments of others for their share of the time, however many keys they have."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from gossamer.protocol.tasks import cancel, loop_s
from tests.swarm.slow import SlowPeer, add_slow, pester, with_slow_lines
from tests.swarm.sybils import HOST, credential_of
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

INVITES = tiny_manifest(
    run={"total_steps": 100_000, "access": "invite", "issuers": [str(HOST.peer_id)]}, fragments={"blocks_per_fragment": 2}
)
PACE = {"step_s": 0.9, "optimizer_s": 0.1}
STORY_S = 200.0
# Meetings of the three quick peers with each other: 76 to 89 with five seeds, 139 without the slow ones, 57 where each of these has its
# own turns, 17 to 24 without turns.
FEWEST_AMONG_QUICK = 66
FEWEST_OF_SLOW = 8  # meetings of a peer with a slow line


def let_nobody_go_first(caller: Peer) -> None:
    caller.book.note_held = lambda *held, **more: None  # type: ignore[method-assign]
    caller.book.is_welcome = lambda *caller: True  # type: ignore[method-assign]


async def acquainted(swarm: Swarm, *, one_network: bool) -> tuple[list[Peer], list[SlowPeer]]:
    """Start three quick peers in networks of their own, and three slow ones of one network, or of one invite of their own."""
    quick, slow = [swarm.add(**PACE) for _ in range(3)], [add_slow(swarm, **PACE) for _ in range(3)]
    for number, peer in enumerate(quick):
        peer.join_with(credential_of(swarm, peer.identity, invite=1), place=1 + number)
    for number, peer in enumerate(slow):
        invite, place = (1, 100) if one_network else (2, 100 + number)
        peer.join_with(credential_of(swarm, peer.identity, invite), place)
    for peer in swarm.peers:
        peer.start()
    await swarm.until(lambda: all(peer.peer.node and peer.lifecycle.may_meet for peer in swarm.peers))
    for peer in swarm.peers:
        for other in swarm.peers:
            peer.book.add_address(other.peer_id, other.addresses[0], loop_s())
    return quick, slow


def meetings_among(peers: Sequence[Peer]) -> int:
    return sum(peer.partners()[str(other.peer_id)] for peer in peers for other in peers) // 2


@pytest.mark.parametrize("one_network", [True, False], ids=["one network", "one invite"])
def test_three_identities_that_take_long_go_behind_the_others_as_one(tmp_path: Path, one_network: bool) -> None:
    async def story(swarm: Swarm) -> None:
        quick, slow = await acquainted(swarm, one_network=one_network)
        for caller in slow:
            let_nobody_go_first(caller)
        work = [asyncio.create_task(pester(caller, victim)) for caller, victim in zip(slow, quick, strict=True)]
        await asyncio.sleep(STORY_S)
        assert meetings_among(quick) >= FEWEST_AMONG_QUICK, meetings_among(quick)
        await cancel(*work)

    play(Swarm(tmp_path, manifest=INVITES, wrap=with_slow_lines), story)


def test_honest_peers_on_slow_lines_behind_one_router_keep_meeting(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        quick, slow = await acquainted(swarm, one_network=True)
        await asyncio.sleep(STORY_S)
        assert meetings_among(quick) >= FEWEST_AMONG_QUICK
        for peer in slow:
            assert peer.num_completed >= FEWEST_OF_SLOW
            assert len(peer.trainer.solo) <= peer.num_completed, "it trains alone"

    play(Swarm(tmp_path, manifest=INVITES, wrap=with_slow_lines), story)
