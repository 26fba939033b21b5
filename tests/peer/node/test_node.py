"""The node as a whole: it leaves in time, says goodbye, counts what it did, and serves nobody that it has banned."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gossamer.peer.swarm.membership import OwnCredential
from gossamer.peer.swarm.presence import FAREWELL_S
from gossamer.peer.sync.client import FetchClient
from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.memory.conversation import Link as Wire
from gossamer.protocol.messages.messages import ContentsKind
from gossamer.protocol.tasks import loop_s
from tests.peer.asking import header_of
from tests.swarm.mallory import MALLORY, nobody
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Swarm

QUIET = tiny_manifest(run={"total_steps": 100_000})


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    return Swarm(tmp_path, manifest=QUIET)


async def test_leaving_takes_no_longer_than_the_grace_even_in_a_slow_meeting(tmp_path: Path) -> None:
    async with Swarm(tmp_path, manifest=QUIET, wire=Wire(latency_s=0.1, bytes_per_s=300.0)) as swarm:
        a, b = swarm.start(2)

        async def announced() -> set[PeerId]:
            return {record.peer_id for record in await swarm.network.peers[b.peer_id].members()}

        await swarm.until(lambda: a.node.meetings.active)
        assert await announced() == {a.peer_id, b.peer_id}
        began_s = loop_s()
        await a.leave(2.0)
        assert loop_s() - began_s <= 2.0 + 1.0, "the grace, and a second for the directory"
        await asyncio.sleep(FAREWELL_S)
        assert await announced() == {b.peer_id}


async def test_the_supervisor_gets_every_meeting(swarm: Swarm) -> None:
    a, b = swarm.start(2)
    await swarm.until(lambda: a.num_completed >= 4)
    for peer in (a, b):
        peer.trainer.frozen = True
    await asyncio.sleep(15.0)
    shown = a.status
    assert shown.meetings["completed"] == a.num_completed and sum(shown.meetings.values()) == len(a.meetings)
    assert shown.bytes["sent"] == sum(done.bytes_sent for done in a.meetings) > 0
    assert {done.route for done in a.meetings if done.outcome == "completed"} == {"memory"} and shown.peers_seen == 1
    assert shown.addresses == ["/ip4/192.0.2.1/tcp/4001"]


async def test_a_banned_peer_gets_no_manifest(swarm: Swarm) -> None:
    (peer,) = swarm.start(1)
    asker = FetchClient(MALLORY, swarm.terms.run_id, OwnCredential(), swarm.network.start_peer(MALLORY.peer_id, nobody))
    assert (await header_of(asker, peer.peer_id, ContentsKind.MANIFEST)).total_bytes == len(swarm.signed.to_bytes())
    peer.book.ban(MALLORY.peer_id, loop_s(), "a test")
    with pytest.raises(Unreachable, match="rejected the stream"):
        await header_of(asker, peer.peer_id, ContentsKind.MANIFEST)
