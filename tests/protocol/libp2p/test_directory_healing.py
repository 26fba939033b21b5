"""Two separate directories merge through a single connection between them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from gossamer.protocol.errors import TransportError
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.directory import MIX_S, DhtDirectory
from gossamer.protocol.libp2p.kademlia import RecordProtocol
from gossamer.protocol.libp2p.record_store import RecordStore
from gossamer.protocol.memory.calls import MemoryP2P
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.tasks import cancel
from tests.protocol.peers import nobody
from tests.protocol.samples import NOW_S, RUN_ID

PULSE_S = 5.0
LOOK_S = 20.0


def now_s() -> float:
    return NOW_S + asyncio.get_running_loop().time()


class Island:
    """A member with a directory, maintained as in a node."""

    def __init__(self, network: MemoryNetwork, number: int) -> None:
        self.identity = Identity(number.to_bytes(4, "little") * 8)
        self.address = f"/ip4/5.{number}.0.1/tcp/4001"
        network.places[self.identity.peer_id] = self.address
        p2p: Any = MemoryP2P(network, network.start_peer(self.identity.peer_id, nobody))
        self.p2p = p2p
        record_store = RecordStore(RUN_ID, now=now_s, rng=random.Random(number))
        self.directory = DhtDirectory(RecordProtocol(p2p, record_store, p2p, self._record))
        self.known: set[PeerId] = set()

    def _record(self) -> MemberRecord:
        at_s = int(now_s())
        return MemberRecord(RUN_ID, self.identity.peer_id, (self.address,), 0, False, at_s, at_s + 90).signed(self.identity)

    async def live(self, first: Island) -> None:
        await self.directory.open()
        looks_s = 0.0
        while True:
            if not self.directory.num_neighbours and first is not self:
                await self.p2p.connect(first.identity.peer_id, [first.address])
                await self.directory.join([first.identity.peer_id])
            await self.directory.maintain()
            if asyncio.get_running_loop().time() >= looks_s:
                looks_s = asyncio.get_running_loop().time() + LOOK_S
                try:
                    await self.directory.announce(self._record())
                except TransportError:
                    continue
                self.known = {record.peer_id for record in await self.directory.members()}
            await asyncio.sleep(PULSE_S)


async def test_one_connection_merges_two_directories() -> None:
    network = MemoryNetwork(link=Link(latency_s=0.025, jitter_s=0.05))
    here, there = ([Island(network, base + number) for number in range(5)] for base in (10, 20))
    tasks = [asyncio.create_task(island.live(group[0])) for group in (here, there) for island in group]
    await asyncio.sleep(120.0)
    mine, theirs = ({island.identity.peer_id for island in group} for group in (here, there))
    assert all(island.known == mine for island in here) and all(island.known == theirs for island in there)
    await here[3].p2p.connect(there[2].identity.peer_id, [there[2].address])
    await asyncio.sleep(2 * MIX_S + 3 * LOOK_S)
    assert all(island.known == mine | theirs for island in (*here, *there))
    await cancel(*tasks)
