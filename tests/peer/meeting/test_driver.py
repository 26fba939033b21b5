"""The driver: every end of a meeting leaves nothing behind, and a fast partner is slowed down."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import NodeEnd
from gossamer.peer.meeting.commands import Command, Finish, SetTimer, WriteJournal
from gossamer.peer.meeting.driver import FRAMES_AHEAD, Caller, Driver, OwnSide
from gossamer.peer.meeting.events import DeadlinePassed, Event, Started, Stopped
from gossamer.peer.meeting.interface import Greeting, MeetingOutcome
from gossamer.peer.meeting.journal import Journal
from gossamer.peer.meeting.machine import Meeting
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
from tests.swarm.world import Peer, Swarm

QUIET = tiny_manifest(run={"total_steps": 100_000})


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    return Swarm(tmp_path, manifest=QUIET)


async def begun(swarm: Swarm) -> tuple[Peer, Peer, asyncio.Task[object]]:
    """Start two peers that do not train, and a meeting between them."""
    peers = [swarm.add() for _ in range(2)]
    for peer in peers:
        peer.trainer.frozen = True
        peer.start()
    await asyncio.sleep(1.0)
    a, b = peers
    a.book.add_address(b.peer_id, "/ip4/192.0.2.1/tcp/4001", asyncio.get_running_loop().time())
    meeting: asyncio.Task[object] = asyncio.create_task(a.node.meetings.try_next(0, set()))
    await swarm.until(lambda: b.node.meetings.active)
    return a, b, meeting


def expect_nothing_left(*peers: Peer) -> None:
    for peer in peers:
        assert not peer.node.meetings.active
        assert not list(peer.payloads.path("x").parent.iterdir()), "files are left behind"
        assert peer.trainer.replica.fragments[0].meeting is None, "the trainer still holds the fragment"


async def test_a_completed_meeting_leaves_no_files(swarm: Swarm) -> None:
    a, b, meeting = await begun(swarm)
    await meeting
    await asyncio.sleep(1.0)
    assert a.trainer.applied.total() == b.trainer.applied.total() == 1
    expect_nothing_left(a, b)


async def test_a_cancelled_meeting_is_dropped_and_its_stream_is_closed(swarm: Swarm) -> None:
    a, b, meeting = await begun(swarm)
    meeting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await meeting
    await asyncio.sleep(1.0)  # far less than any deadline
    assert a.trainer.applied.total() == b.trainer.applied.total() == 0
    expect_nothing_left(a, b)


async def test_a_stopped_meeting_sends_its_code_to_the_partner(swarm: Swarm) -> None:
    a, b, meeting = await begun(swarm)
    a.node.meetings.active[0].stop("we are off", RefusalCode.LEAVING)
    await meeting
    await asyncio.sleep(1.0)
    assert [done.outcome for done in a.meetings] == [MeetingOutcome.ABANDONED.name.lower()]
    assert a.peer_id not in [entry.peer_id for entry in b.book.live(asyncio.get_running_loop().time())]
    expect_nothing_left(a, b)


async def test_a_trainer_that_dies_ends_its_meetings(swarm: Swarm) -> None:
    a, b, meeting = await begun(swarm)
    a.kill_trainer()
    await meeting
    await asyncio.sleep(1.0)
    assert a.outcomes() == {"abandoned": 1} and b.trainer.applied.total() == 0
    assert not b.book.is_banned(a.peer_id, asyncio.get_running_loop().time())
    expect_nothing_left(b)


class RecordingMeeting(Meeting):
    """Writes to the journal at every event."""

    def handle(self, event: Event) -> list[Command]:
        return [WriteJournal(b"m" * 16, b"")]


class StuckJournal(Journal):
    """Writes nothing until it is freed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_free = asyncio.Event()

    async def commit(self, meeting_id: bytes, failed_blocks: bytes) -> None:
        await self.is_free.wait()


async def test_the_reader_takes_only_a_few_frames_ahead_of_the_machine(tmp_path: Path) -> None:
    num_sent = 0

    async def flood(purpose: Purpose, stream: Stream) -> None:
        nonlocal num_sent
        await stream.receive()
        while True:
            await stream.send(Chunk(Part.PAYLOAD, num_sent, b"x" * 1000))
            num_sent += 1

    network, (me, partner) = MemoryNetwork(), (Identity(seed) for seed in SEEDS)
    network.start_peer(partner.peer_id, flood)
    transport = network.start_peer(me.peer_id, nobody)
    stream = await transport.connect(partner.peer_id, (), Purpose.MEET)
    await stream.send(Chunk(Part.PAYLOAD, 0, b"go"))
    journal = StuckJournal(tmp_path / "journal")
    own = OwnSide(NodeEnd(tmp_path), PayloadFolder(tmp_path / "payloads"), journal)
    meeting = RecordingMeeting(1, Greeting(membership(me), partner.peer_id, 0, b"n" * 16, 0.0))
    running = asyncio.create_task(Driver(meeting, stream, own, Caller(transport, AddressBook(me.peer_id), b"r" * 32)).run())
    await asyncio.sleep(60.0)
    assert FRAMES_AHEAD <= num_sent < FRAMES_AHEAD + 16
    journal.is_free.set()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    journal.close()
    await network.close()


class TimedMeeting(Meeting):
    """Writes to the journal at its start; gives itself more time at a Stopped; ends when a deadline has passed."""

    def handle(self, event: Event) -> list[Command]:
        match event:
            case Started():
                return [SetTimer(1.0), WriteJournal(b"m" * 16, b"")]
            case Stopped():
                return [SetTimer(5.0)]
            case DeadlinePassed():
                self.finish = Finish(MeetingOutcome.FAILED, "late")
                return [self.finish]
        return []


def test_a_timer_that_was_replaced_ends_nothing(tmp_path: Path) -> None:
    """Else a partner that was in time is called late, where a timer expires while the event that replaces it waits in the queue."""

    async def story() -> float:
        network, (me, partner) = MemoryNetwork(), (Identity(seed) for seed in SEEDS)
        transport = network.start_peer(me.peer_id, nobody)
        journal = StuckJournal(tmp_path / "journal")
        own = OwnSide(NodeEnd(tmp_path), PayloadFolder(tmp_path / "payloads"), journal)
        meeting = TimedMeeting(1, Greeting(membership(me), partner.peer_id, 0, b"n" * 16, 0.0))
        driver = Driver(meeting, None, own, Caller(transport, AddressBook(me.peer_id), b"r" * 32))
        began_s, running = asyncio.get_running_loop().time(), asyncio.create_task(driver.run())
        await asyncio.sleep(0.5)
        driver.stop("more time", RefusalCode.BUSY)  # before the timer expires
        await asyncio.sleep(1.5)
        journal.is_free.set()
        await running
        journal.close()
        await network.close()
        return asyncio.get_running_loop().time() - began_s

    assert virtual_time.run(story()) == pytest.approx(7.0)
