"""The directory over real p2pd processes: peers find each other, and dead peers do no harm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gossamer.protocol.errors import BadMessage, TransportError
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.directory import DhtDirectory
from gossamer.protocol.libp2p.kademlia import RecordProtocol
from gossamer.protocol.libp2p.p2pd import AttachedP2P, Daemon
from gossamer.protocol.libp2p.record_store import RecordStore
from gossamer.protocol.messages.records import MemberRecord
from tests.protocol.samples import RECORD, RUN_ID
from tests.protocol.worlds import start_daemon

pytestmark = pytest.mark.real_time


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """A peer that runs only the directory."""

    identity: Identity
    daemon: Daemon
    p2p: AttachedP2P
    rpc: RecordProtocol
    directory: DhtDirectory
    record_store: RecordStore
    strangers: set[PeerId]  # peers whose records it rejects

    def record(self, sequence: int = 1) -> MemberRecord:
        return signed(self.identity, self.daemon.addresses, sequence)


def signed(identity: Identity, addresses: tuple[str, ...], sequence: int) -> MemberRecord:
    made = replace(RECORD, peer_id=identity.peer_id, addresses=addresses, credential=None, sequence=sequence)
    return replace(made, expires_s=int(time.time()) + 90, signature=b"").signed(identity)


async def take_seat(stack: AsyncExitStack, home: Path, first: Seat | None) -> Seat:
    daemon = await start_daemon(stack, home)
    identity = Identity.load_or_create(home / "key")
    strangers: set[PeerId] = set()
    record_store = RecordStore(RUN_ID, lambda record: record.peer_id not in strangers)
    p2p = await AttachedP2P.attach(daemon.socket_path)
    stack.push_async_callback(p2p.close)
    rpc = RecordProtocol(p2p, record_store, daemon.control, lambda: signed(identity, daemon.addresses, 0))
    directory = DhtDirectory(rpc)
    await directory.open()
    if first is not None:
        await daemon.control.connect(first.identity.peer_id, first.daemon.addresses)
        assert await directory.join([first.identity.peer_id]) == 1
    return Seat(identity, daemon, p2p, rpc, directory, record_store, strangers)


@asynccontextmanager
async def seated(folder: Path, num_seats: int) -> AsyncIterator[list[Seat]]:
    async with AsyncExitStack() as stack:
        seats: list[Seat] = []
        for number in range(num_seats):
            seats.append(await take_seat(stack, folder / str(number), seats[0] if seats else None))
        yield seats


async def seen_by(seat: Seat) -> set[MemberRecord]:
    return set(await seat.directory.members())


async def test_peers_find_each_other_and_survive_the_end_of_the_first(folder: Path) -> None:
    async with seated(folder, 3) as seats:
        records = [seat.record() for seat in seats]
        for seat, record in zip(seats, records, strict=True):
            await seat.directory.announce(record)
        for seat in seats:
            assert await seen_by(seat) == set(records)
        seats[0].daemon.kill()
        newer = replace(seats[1].record(sequence=2), finished=True, signature=b"").signed(seats[1].identity)
        await seats[1].directory.announce(newer)
        assert newer in await seen_by(seats[2])


async def test_announce_raises_if_no_node_stores_the_record(folder: Path) -> None:
    async with seated(folder, 2) as seats:
        one, other = seats
        other.strangers.add(one.identity.peer_id)
        with pytest.raises(TransportError, match="none of 1 directory nodes stored"):
            await one.directory.announce(one.record())


async def test_announce_accepts_an_empty_directory_and_rejects_an_invalid_record(folder: Path) -> None:
    async with seated(folder, 1) as seats:
        (one,) = seats
        record = one.record()
        await one.directory.announce(record)
        assert await one.directory.members() == [record]
        with pytest.raises(BadMessage) as caught:
            await one.directory.announce(replace(record, sequence=2, expires_s=1, signature=b"").signed(one.identity))
        assert "clock" in caught.value.hint


async def test_calls_end_in_time_after_p2pd_has_died(folder: Path) -> None:
    async with seated(folder, 2) as seats:
        one, _ = seats
        await one.directory.announce(one.record())
        looking = asyncio.create_task(one.directory.members())
        one.daemon.kill()
        await one.daemon.died()
        async with asyncio.timeout(8):
            await looking
            with pytest.raises(TransportError):
                await one.directory.announce(one.record(sequence=2))
            with pytest.raises(TransportError):
                await one.directory.members()
        assert one.p2p.is_broken
