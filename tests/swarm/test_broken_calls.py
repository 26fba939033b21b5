"""Members that call, hold the meeting for a while and break it off keep nobody from the others for more than their share of the time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from gossamer.protocol.errors import PeerGone, RefusalCode, Unreachable
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import Hello, Opening, Refusal, RunPhase
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import cancel
from tests.swarm.sybils import credential_of
from tests.swarm.test_slow_meetings import INVITES, PACE, meetings_among
from tests.swarm.world import Peer, Swarm, play

KEYS = [Identity(bytes([number]) * 32) for number in range(100, 104)]
PLACE = "/ip4/66.6.0.1/tcp/4001"
STORY_S = 60.0
FEWEST = 21  # meetings of the three honest peers with each other: about 42 without the callers, 3 where breaking off costs these nothing


def hello(swarm: Swarm, who: Identity, victim: Peer, fragment: int, number: int) -> Hello:
    terms, credential = swarm.terms.fragments[fragment], credential_of(swarm, who, invite=2)
    return Hello(
        opening=Opening(1, swarm.terms.run_id, who.peer_id, victim.peer_id, number.to_bytes(16, "big"), credential=credential),
        fragment=fragment,
        codec=swarm.terms.codec_id,
        tokens=10,
        global_step=victim.global_step,
        sketch_bytes=terms.sketch_bytes,
        payload_bytes=terms.payload_bytes,
        phase=RunPhase.TRAIN,
    ).signed(who)


async def hold(swarm: Swarm, who: Identity, victim: Peer, held_s: float) -> None:
    """Call a victim, wait after its answer, break off, and call again at once, about each fragment in turn."""
    for number in range(1_000_000):
        with suppress(PeerGone, Unreachable):
            stream: Stream = await swarm.network.peers[who.peer_id].connect(victim.peer_id, victim.addresses, Purpose.MEET)
            await stream.send(hello(swarm, who, victim, number % len(swarm.terms.fragments), number))
            if isinstance(await stream.receive(), Hello):
                await asyncio.sleep(held_s)
                await stream.send(Refusal(RefusalCode.BUSY))
            stream.close()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("held_s", [0.1, 1.8])
def test_callers_of_one_invite_that_break_off_keep_nobody_from_the_others(held_s: float, tmp_path: Path) -> None:
    async def nobody(purpose: Purpose, stream: Stream) -> None:
        stream.close()

    async def story(swarm: Swarm) -> None:
        honest = [swarm.add(**PACE) for _ in range(3)]
        for number, peer in enumerate(honest):
            peer.join_with(credential_of(swarm, peer.identity, invite=1), place=1 + number).start()
        await swarm.until(lambda: all(peer.peer.node and peer.lifecycle.may_meet for peer in honest))
        for who in KEYS:
            swarm.network.places[who.peer_id] = PLACE
            swarm.network.start_peer(who.peer_id, nobody)
        await asyncio.sleep(30.0)
        before = meetings_among(honest)
        work = [asyncio.create_task(hold(swarm, who, victim, held_s)) for who in KEYS for victim in honest]
        await asyncio.sleep(STORY_S)
        assert meetings_among(honest) - before >= FEWEST, meetings_among(honest) - before
        await cancel(*work)

    play(Swarm(tmp_path, manifest=INVITES), story)
