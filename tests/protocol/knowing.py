"""An in-memory network with an ideal directory: an announced record is found at once by all peers on the same side of a partition."""

from __future__ import annotations

import asyncio

from gossamer.protocol.errors import TransportError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.memory.network import MemoryNetwork, MemoryPeer
from gossamer.protocol.messages.records import MemberRecord


class KnowingPeer(MemoryPeer):
    """A peer that is also a Directory."""

    async def announce(self, record: MemberRecord) -> None:
        """Publish this peer's own record on its side of a partition. Raises TransportError if it is alone, BadMessage or BadSignature."""
        network = self._network
        assert isinstance(network, KnowingNetwork)
        record.check(record.run_id, network.now_s())
        await asyncio.sleep(2 * self.line.link.latency_s)
        others = [peer for peer in network.up() if peer is not self]
        if not self.is_up or (others and all(network.is_cut(self.peer_id, peer.peer_id) for peer in others)):
            raise TransportError("nobody took the record", hint="the peer is down or cut off")
        known = network.records.get(record.peer_id)
        if known is None or record.supersedes(known):
            network.records[record.peer_id] = record

    async def members(self) -> list[MemberRecord]:
        """Return the verified, unexpired records that can be reached now. Raises TransportError if this peer is down."""
        network = self._network
        assert isinstance(network, KnowingNetwork)
        await asyncio.sleep(2 * self.line.link.latency_s)
        if not self.is_up:
            raise TransportError("this peer is down")
        now_s = network.now_s()
        return [rec for rec in network.records.values() if rec.expires_s > now_s and not network.is_cut(self.peer_id, rec.peer_id)]


class KnowingNetwork(MemoryNetwork):
    """The network and the records of all peers."""

    peers: dict[PeerId, KnowingPeer]
    peer_type = KnowingPeer

    def __init__(self, seed: int = 0, link: Link | None = None) -> None:
        super().__init__(seed, link)
        self.records: dict[PeerId, MemberRecord] = {}  # the latest record of each peer
