"""The directory over libp2p: member records of a run, kept by its peers in a DHT.

Only hints come out of it (`transport.Directory`). A peer's clock matters: records are in force between absolute times, so one
that runs more than 30 s ahead has its records refused, and one that runs minutes ahead sees others' as expired. Such a
peer still trains and meets, through bootstraps and the acquaintances that partners name; hivemind's own answer, not to start at
all when clocks differ by 3 s, is not taken over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Self

from protocol.errors import BadMessage, TransportError, Unreachable
from protocol.identity import PeerId
from protocol.libp2p.hivemind_imports import PeerID
from protocol.libp2p.kademlia import AttachedP2P, RecordNode
from protocol.libp2p.record_store import RecordShelf
from protocol.messages.records import MemberRecord

NUM_HOLDERS = 10
SEARCH_S = 6.0
CLOSE_S = 2.0
NEIGHBOURS_ASKED = 20  # for the nodes around our own place


class DhtDirectory:
    """One peer's part of the directory, over one p2pd. Every call ends in time by itself; all are cancel-safe."""

    def __init__(self, node: RecordNode, p2p: AttachedP2P, shelf: RecordShelf) -> None:
        self._node = node
        self._p2p = p2p
        self._shelf = shelf
        self._searches: set[asyncio.Task[object]] = set()

    @classmethod
    async def open(cls, p2p: AttachedP2P, shelf: RecordShelf, client_mode: bool = False) -> Self:
        """Start serving `shelf` to others; in client mode only ask (a peer that nobody can dial)."""
        return cls(await RecordNode.open(p2p, shelf, client_mode), p2p, shelf)

    async def close(self) -> None:
        """End what is under way, and the connection it goes over. Others notice by themselves."""
        await self._p2p.close()
        if self._searches:  # they end at once: every call of theirs fails now
            await asyncio.wait(self._searches, timeout=CLOSE_S)

    @property
    def is_broken(self) -> bool:
        """Whether the connection to p2pd has ended."""
        return self._p2p.is_broken

    def tidy(self) -> None:
        """Free what hivemind forgets to free; call now and then."""
        self._p2p.tidy()

    @property
    def num_neighbours(self) -> int:
        """How many nodes of the DHT are known to be alive."""
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def join(self, peers: Iterable[PeerId]) -> int:
        """Get to know the DHT through connected `peers`; return how many of them are part of it."""
        places = await asyncio.gather(*(self._node.protocol.call_ping(PeerID(peer.raw)) for peer in peers))
        if any(places):
            await self._nearest([self._node.node_id.to_bytes()], NEIGHBOURS_ASKED)
        return sum(place is not None for place in places)

    async def announce(self, record: MemberRecord) -> None:
        """Publish this peer's own record; a later one, by its sequence, replaces it.

        Raises TransportError when others are there and none of them holds it now, BadMessage when it is not in force by our clock.
        """
        key, data = self._shelf.own_key(record.peer_id), record.to_bytes()
        if not self._shelf.offer(key, data):
            raise BadMessage("the record is out of date, not ours to publish, or not signed", hint="check this machine's clock")
        self._need_connection()
        known = self.num_neighbours
        nearest = (await self._nearest([key], NUM_HOLDERS))[key]
        held = await asyncio.gather(*(self._node.protocol.call_store(peer, key, data) for peer in nearest))
        if not any(held) and (known or nearest):
            raise TransportError(
                f"none of {max(known, len(nearest))} directory nodes took our record",
                hint="check this machine's clock: records more than 30 s ahead are refused",
            )

    async def members(self) -> list[MemberRecord]:
        """Return the verified, unexpired records that can be found now, and those seen before. Raises Unreachable when p2pd is gone."""
        self._need_connection()
        await self._nearest(self._shelf.key_ids(), NUM_HOLDERS)
        return self._shelf.records()

    def _need_connection(self) -> None:
        if self.is_broken:
            raise Unreachable("the connection to p2pd has ended")

    async def _nearest(self, keys: Iterable[bytes], num_nodes: int) -> dict[bytes, list[PeerID]]:
        """Search in a task of its own: it ends by itself in SEARCH_S, while hivemind's search leaks tasks when it is cancelled."""
        task = asyncio.create_task(self._node.nearest(list(keys), num_nodes, SEARCH_S), name="directory search")
        self._searches.add(task)
        task.add_done_callback(self._searches.discard)
        return await asyncio.shield(task)
