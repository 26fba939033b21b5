"""What others say about who is there: only a peer's own latest word counts, and nobody can fill the book with strangers."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

from peer.partners import MAX_BANS, MAX_ENTRIES
from protocol.identity import Identity, PeerId
from protocol.messages import Refusal, RefusalCode
from protocol.transport import Purpose
from tests.swarm.mallory import MALLORY, hello_to, nobody, record
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})


def now() -> float:
    return asyncio.get_running_loop().time()


def test_nobody_can_speak_for_another(tmp_path: Path) -> None:
    """Forged, old and foreign records change nothing, and nobody is blamed for passing them on."""

    async def story(swarm: Swarm) -> None:
        a, b, c = swarm.start(3)
        await swarm.until(lambda: all(len(peer.node.book.announced(now())) == 2 for peer in swarm.peers), within_s=60.0)
        entry = next(entry for entry in a.node.book.announced(now()) if entry.peer_id == c.peer_id)
        held = entry.record
        assert held is not None
        lies = [
            record(swarm, c.identity, sequence=held.sequence - 1),
            record(swarm, c.identity, sequence=held.sequence),
            replace(record(swarm, c.identity, sequence=held.sequence + 1), clock_steps=77),
            replace(record(swarm, c.identity, sequence=held.sequence + 1), run_id=b"r" * 32, signature=b"").signed(c.identity),
            replace(record(swarm, c.identity, sequence=held.sequence + 1), expires_s=held.expires_s + 4000, signature=b"").signed(
                c.identity
            ),
        ]
        for lie in lies:
            a.node.meetings._around.hearsay.take_bytes(lie.to_bytes())
        a.node.meetings._around.hearsay.take_bytes(b"\xff" * 60)
        assert entry.record == held and "192.0.2.66" not in "".join(entry.addresses)
        a.node.meetings._around.hearsay.take(record(swarm, a.identity, sequence=2**40))
        assert a.peer_id not in [entry.peer_id for entry in a.node.book.live(now())]
        assert not any(a.node.book.is_banned(peer.peer_id, now()) for peer in (b, c))

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_strangers_are_neither_met_nor_remembered(tmp_path: Path) -> None:
    names = [str(Identity(number.to_bytes(4, "little") * 8).peer_id) for number in (1, 2)]
    swarm = Swarm(tmp_path, manifest=tiny_manifest(run={"access": "allowlist", "members": names}))

    async def story(swarm: Swarm) -> None:
        a, b = swarm.start(2)
        await asyncio.sleep(1.0)
        transport = swarm.network.transport(MALLORY.peer_id, nobody)
        await swarm.network.directory(MALLORY.peer_id).announce(record(swarm, MALLORY, sequence=5))
        stream = await transport.connect(a.peer_id, (), Purpose.MEET)
        await stream.send(hello_to(swarm, a.peer_id))
        answer = await stream.receive()
        assert isinstance(answer, Refusal) and answer.code is RefusalCode.NOT_INVITED
        await swarm.until(lambda: a.outcomes()["completed"] >= 3)
        await asyncio.sleep(25.0)
        assert list(a.node.book._entries) == [b.peer_id]

    play(swarm, story)


def test_the_book_stays_bounded(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        a, b = swarm.start(2)
        await swarm.until(lambda: a.outcomes()["completed"] >= 2)
        book = a.node.book
        for number in range(MAX_ENTRIES + 500):
            stranger = PeerId.from_public_key(hashlib.sha256(number.to_bytes(4, "little")).digest())
            book.saw(stranger, now(), 1)
            book.ban(stranger, now() + number)
        assert len(book._entries) == MAX_ENTRIES and len(book._banned_until_s) == MAX_BANS
        assert b.peer_id in book._entries, "a good peer was forgotten for strangers"

    play(Swarm(tmp_path, manifest=QUIET), story)
