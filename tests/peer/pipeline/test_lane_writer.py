"""What a lane keeps for a partner that reads late or never."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gossamer.peer.link.messages import HopFile, hop_file
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.pipeline.commands import SendHop
from gossamer.peer.pipeline.lane_writer import MOST_NOTICES, LaneWriter
from gossamer.protocol.limits import WINDOW
from gossamer.protocol.messages.messages import HopAnswer, HopNotice, NoticeKind, Part
from gossamer.protocol.streams.transport import Inbox, Stream
from tests.protocol.samples import ALICE

VALUES = 40


class Lane:
    """A writer on a stream whose partner reads nothing before `reads` is set."""

    def __init__(self, folder: Path) -> None:
        self.payloads = PayloadFolder(folder)
        self.reads = asyncio.Event()
        self.num_frames = 0
        self.sent: list[int] = []
        self.lost: list[int] = []
        stream = Stream(ALICE.peer_id, "memory", Inbox(4), self._write, None)
        self.writer = LaneWriter(stream, self.payloads, lambda hop: self.sent.append(hop.hop), lambda hop: self.lost.append(hop.hop))

    async def _write(self, _frame: bytes) -> None:
        await self.reads.wait()
        self.num_frames += 1

    def put(self, hop: int) -> None:
        name = hop_file(hop, HopFile.OWN_BACKWARD)
        self.writer.put(SendHop(1, hop, HopAnswer(hop, 1.0, 1, 0), ((Part.GRADIENT, name, VALUES),)))

    async def run(self) -> None:
        """Send what waits; `reads` opens once the first message is under way."""
        running = asyncio.create_task(self.writer.run())
        for _ in range(10):
            await asyncio.sleep(0)
        for hop in range(1, 4):  # the hops are over: their files go
            if not self.payloads.path(hop_file(hop, HopFile.OWN_BACKWARD)).is_dir():
                self.payloads.remove_hop(hop)
        self.reads.set()
        for _ in range(100):
            await asyncio.sleep(0)
        running.cancel()


def test_only_the_hop_that_is_being_sent_is_mapped(tmp_path: Path) -> None:
    async def story() -> None:
        lane = Lane(tmp_path / "payloads")
        for hop in range(1, 4):
            lane.payloads.write(hop_file(hop, HopFile.OWN_BACKWARD), bytes(VALUES))
            lane.put(hop)
        await lane.run()
        assert lane.sent == [1] and lane.lost == [2, 3] and lane.num_frames == 2

    asyncio.run(story())


def test_a_file_that_cannot_be_opened_loses_its_hop_and_nothing_else(tmp_path: Path) -> None:
    async def story() -> None:
        lane = Lane(tmp_path / "payloads")
        lane.payloads.path(hop_file(1, HopFile.OWN_BACKWARD)).mkdir()  # to open it raises OSError
        lane.payloads.write(hop_file(2, HopFile.OWN_BACKWARD), bytes(VALUES))
        lane.payloads.write(hop_file(3, HopFile.OWN_BACKWARD), bytes(VALUES - 1))
        for hop in range(1, 4):
            lane.put(hop)
        await lane.run()
        assert lane.sent == [2] and lane.lost == [1, 3]

    asyncio.run(story())


def test_all_hops_of_a_lane_may_be_withdrawn_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        lane = Lane(tmp_path / "payloads")
        for number in range(WINDOW):
            lane.writer.notify(HopNotice(number + 1, NoticeKind.WITHDRAWN))
        assert not lane.writer.is_full

    asyncio.run(story())


def test_notices_that_nobody_reads_do_not_pile_up(tmp_path: Path) -> None:
    async def story() -> None:
        lane = Lane(tmp_path / "payloads")
        for number in range(MOST_NOTICES):
            lane.writer.notify(HopNotice(number + 1, NoticeKind.KNOWN))
        assert not lane.writer.is_full
        lane.writer.notify(HopNotice(MOST_NOTICES + 1, NoticeKind.KNOWN))
        assert lane.writer.is_full

    asyncio.run(story())
