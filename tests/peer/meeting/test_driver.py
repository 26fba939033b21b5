"""A meeting carried out: it ends clean however it ends, and a fast partner waits for us."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import NodeEnd
from gossamer.peer.meeting.driver import FRAMES_AHEAD, Caller, Driver, OwnSide
from gossamer.peer.meeting.hello import Greeting
from gossamer.peer.meeting.journal import Journal
from gossamer.peer.meeting.machine import Meeting
from gossamer.peer.meeting.words import MeetingOutcome
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.identity import Identity
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.messages.messages import Chunk, Part
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.peer.two_sides import SEEDS, membership
from tests.swarm.mallory import nobody
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})


async def begun(swarm: Swarm) -> tuple[Peer, Peer, asyncio.Task[object]]:
    """Two still peers, and a meeting that one has begun with the other."""
    peers = [swarm.add() for _ in range(2)]
    for peer in peers:
        peer.trainer.frozen = True
        peer.start()
    await asyncio.sleep(1.0)
    a, b = peers
    a.book.hint(b.peer_id, "/ip4/192.0.2.1/tcp/4001", asyncio.get_running_loop().time())
    meeting: asyncio.Task[object] = asyncio.create_task(a.node.meetings.try_next(0, set()))
    await swarm.until(lambda: b.node.meetings.active)
    return a, b, meeting


def expect_nothing_left(*peers: Peer) -> None:
    for peer in peers:
        assert not peer.node.meetings.active
        assert not list(peer.payloads.path("x").parent.iterdir()), "files are left behind"
        assert peer.trainer.replica.fragments[0].meeting is None, "the trainer still holds the fragment"


def test_a_meeting_that_counts_leaves_no_files(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        a, b, meeting = await begun(swarm)
        await meeting
        await asyncio.sleep(1.0)
        assert a.trainer.applied.total() == b.trainer.applied.total() == 1
        expect_nothing_left(a, b)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_cancelled_meeting_is_dropped_and_the_partner_hears_the_end(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        a, b, meeting = await begun(swarm)
        meeting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await meeting
        await asyncio.sleep(1.0)  # far less than any deadline
        assert a.trainer.applied.total() == b.trainer.applied.total() == 0
        expect_nothing_left(a, b)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_stopped_meeting_tells_the_partner_why(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        a, b, meeting = await begun(swarm)
        a.node.meetings.active[0].stop("we are off", RefusalCode.LEAVING)
        await meeting
        await asyncio.sleep(1.0)
        assert [done.outcome for done in a.meetings] == [MeetingOutcome.ABANDONED.name.lower()]
        assert a.peer_id not in [entry.peer_id for entry in b.book.live(asyncio.get_running_loop().time())]
        expect_nothing_left(a, b)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_trainer_that_dies_ends_its_meetings(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        a, b, meeting = await begun(swarm)
        a.kill_trainer()
        await meeting
        await asyncio.sleep(1.0)
        assert a.outcomes() == {"abandoned": 1} and b.trainer.applied.total() == 0
        assert not b.book.is_banned(a.peer_id, asyncio.get_running_loop().time())
        expect_nothing_left(b)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_fast_partner_waits_until_its_frames_are_met(tmp_path: Path) -> None:
    """Whatever the machine is busy with, no more than a few frames are taken from the stream."""
    num_sent = 0

    async def flood(purpose: Purpose, stream: Stream) -> None:
        nonlocal num_sent
        await stream.receive()
        while True:
            await stream.send(Chunk(Part.PAYLOAD, num_sent, b"x" * 1000))
            num_sent += 1

    async def story() -> None:
        network, (me, partner) = MemoryNetwork(), (Identity(seed) for seed in SEEDS)
        network.transport(partner.peer_id, flood)
        transport = network.transport(me.peer_id, nobody)
        stream = await transport.connect(partner.peer_id, (), Purpose.MEET)
        await stream.send(Chunk(Part.PAYLOAD, 0, b"go"))
        greeting = Greeting(membership(me), partner.peer_id, 0, b"n" * 16, 0.0)
        own = OwnSide(NodeEnd(tmp_path), PayloadFolder(tmp_path / "payloads"), Journal(tmp_path / "journal"))
        driver = Driver(Meeting(1, greeting), stream, own, Caller(transport, AddressBook(me.peer_id), b"r" * 32))
        reader = driver._spawn(driver._read(stream))  # without the machine: it is as slow as can be
        await asyncio.sleep(60.0)
        assert FRAMES_AHEAD <= num_sent < FRAMES_AHEAD + 16
        assert driver._events.qsize() == FRAMES_AHEAD
        reader.cancel()
        await driver._clean_up()
        own.journal.close()
        await network.close()

    virtual_time.run(story())
