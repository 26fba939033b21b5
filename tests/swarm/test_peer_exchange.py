"""What others say about who is there: nobody can speak for another, and strangers get no place in the book."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import Hello, Refusal
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.streams.transport import Purpose
from gossamer.protocol.tasks import loop_s
from tests.protocol.samples import changed
from tests.swarm.mallory import MALLORY, hello_to, nobody, record
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})


def known(peer: Peer, other: Identity) -> KnownPeer:
    return next(entry for entry in peer.book.announced(loop_s()) if entry.peer_id == other.peer_id)


async def gossip(swarm: Swarm, listener: Peer, *records: MemberRecord) -> None:
    """Have Mallory open a meeting in which it passes these records on, and hang up."""
    stream = await swarm.network.start_peer(MALLORY.peer_id, nobody).connect(listener.peer_id, (), Purpose.MEET)
    encoded = tuple(record.to_bytes() for record in records)
    await stream.send(
        changed(hello_to(swarm, listener.peer_id), global_step=listener.global_step, records=encoded, signature=b"").signed(MALLORY)
    )
    assert isinstance(await stream.receive(), Hello)
    stream.close()
    await asyncio.sleep(1.0)
    assert listener.meetings[-1].partner == str(MALLORY.peer_id)


def test_a_forged_record_is_dropped_and_its_relayer_not_blamed(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        a, b = swarm.start(2)
        await swarm.until(lambda: a.book.announced(loop_s()))
        for peer in (a, b):
            peer.trainer.frozen = True
        await swarm.until(lambda: not a.node.meetings.active)
        held = known(a, b.identity).record
        assert held is not None
        forged = record(swarm, b.identity, held.sequence + 1).signed(MALLORY)
        await gossip(swarm, a, forged, record(swarm, b.identity, held.sequence - 1))
        assert known(a, b.identity).record == held
        assert not a.book.is_banned(MALLORY.peer_id, loop_s()) and not a.book.is_banned(b.peer_id, loop_s())
        later = record(swarm, b.identity, held.sequence + 1)
        await gossip(swarm, a, later)
        assert known(a, b.identity).record == later, "true words pass the same way"

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_strangers_are_neither_met_nor_remembered(tmp_path: Path) -> None:
    names = [str(Identity(number.to_bytes(4, "little") * 8).peer_id) for number in (1, 2)]
    swarm = Swarm(tmp_path, manifest=tiny_manifest(run={"access": "allowlist", "members": names}))

    async def story(swarm: Swarm) -> None:
        a, b = swarm.start(2, step_s=1.0)
        await asyncio.sleep(1.0)
        transport = swarm.network.start_peer(MALLORY.peer_id, nobody)
        await swarm.network.peers[MALLORY.peer_id].announce(record(swarm, MALLORY, sequence=5))
        stream = await transport.connect(a.peer_id, (), Purpose.MEET)
        await stream.send(hello_to(swarm, a.peer_id))
        answer = await stream.receive()
        assert isinstance(answer, Refusal) and answer.code is RefusalCode.NOT_INVITED
        await asyncio.sleep(25.0)  # with a directory lookup
        await swarm.until(lambda: a.num_completed >= 3)
        assert len(a.book) == 1 and a.book.get(b.peer_id).has_global_step

    play(swarm, story)
