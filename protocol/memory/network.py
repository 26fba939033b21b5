"""In-memory transport for many peers in one process, with latency, rates, loss, NAT routers, relays, partitions and crashes.

Messages pass through the real wire code and the real admission control. On a VirtualTimeLoop one seed gives one schedule.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.memory.conversation import Conversation, Link, MemoryLine
from gossamer.protocol.streams.admission import Admission, InboundConnection, StreamCaps, handle
from gossamer.protocol.streams.transport import Purpose, Stream, StreamHandler
from gossamer.protocol.tasks import cancel, loop_s, spawn

DIAL_S = 5.0  # timeout of an unanswered dial
EPOCH_S = 1_700_000_000.0  # Unix time at loop time 0

CallHandler = Callable[[Any, Any], Awaitable[Any]]


class MemoryPeer:
    """The Transport of a peer on a MemoryNetwork, from its start to its crash. Created by `MemoryNetwork.transport`."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId, link: Link, handler: StreamHandler, admission: Admission) -> None:
        self.peer_id = peer_id
        self.line = MemoryLine(link)
        self.handler = handler
        self.admission = admission
        self.calls: dict[str, tuple[CallHandler, Any]] = {}  # name -> handler and request type
        self.is_up = True
        self._network = network

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        """Open a stream to `partner`, which takes a round trip. A partner in `places` needs a matching address. Raises Unreachable."""
        return await self._network.open(self, partner, purpose, addresses)


class MemoryNetwork:
    """The network between the peers of one event loop. `seed` determines jitter and loss; `link` is the default link of a peer."""

    peer_type = MemoryPeer

    def __init__(self, seed: int = 0, link: Link | None = None) -> None:
        self.draw = random.Random(seed).random
        self._link = link or Link()
        self.peers: dict[PeerId, MemoryPeer] = {}  # the latest instance of each peer, up or down
        self.places: dict[PeerId, str] = {}  # multiaddrs; a peer without one is reachable by its peer id alone
        self.hidden: dict[PeerId, tuple[PeerId, ...]] = {}  # peers behind a NAT router -> the relays that serve them
        self._connections: dict[PeerId, dict[PeerId, PeerId | None]] = {}  # peer -> connected peer -> relay, None if direct
        self._group: dict[PeerId, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start_peer(
        self,
        peer_id: PeerId,
        handler: StreamHandler,
        link: Link | None = None,
        caps: StreamCaps | None = None,
        is_banned: Callable[[PeerId], bool] = lambda partner: False,
        has_met: Callable[[PeerId], bool] = lambda partner: False,
    ) -> MemoryPeer:
        """Start a peer and return its transport. A peer that is up is killed first. The last two are asked about each caller."""
        self.kill(peer_id)
        self.peers[peer_id] = self.peer_type(self, peer_id, link or self._link, handler, Admission(caps, is_banned, has_met))
        return self.peers[peer_id]

    def now_s(self) -> float:
        """Return simulated Unix time in seconds, which follows the loop's clock."""
        return EPOCH_S + loop_s()

    async def close(self) -> None:
        """Cancel every running stream handler."""
        await cancel(*self._tasks)

    def is_up(self, peer_id: PeerId) -> bool:
        """Return whether the peer is up."""
        return peer_id in self.peers and self.peers[peer_id].is_up

    def kill(self, peer_id: PeerId, *, is_delivered: bool = False) -> None:
        """Crash a peer: its streams end with PeerGone at both ends. Frames that it has in flight are lost unless `is_delivered`."""
        if not self.is_up(peer_id):
            return
        self.peers[peer_id].is_up = False
        for conversation in list(self.peers[peer_id].line.conversations):
            conversation.die(peer_id, is_delivered=is_delivered)
        for other in self._connections.pop(peer_id, {}):
            self._connections.get(other, {}).pop(peer_id, None)
        for conversation in [one for peer in self.up() for one in peer.line.conversations if one.relay == peer_id]:
            conversation.give_up()

    def partition(self, *groups: Collection[PeerId]) -> None:
        """Partition the network into groups and the rest, in place of the last partition. A call without groups heals the network."""
        self._group = {peer_id: number for number, group in enumerate(groups, 1) for peer_id in group}
        for peer in self.up():
            for conversation in list(peer.line.conversations):
                conversation.set_cut(not self._passes(*conversation.peers, conversation.relay))

    def is_cut(self, one: PeerId, other: PeerId) -> bool:
        """Return whether a partition separates two peers."""
        return self._group.get(one, 0) != self._group.get(other, 0)

    def up(self) -> list[MemoryPeer]:
        """Return the peers that are up."""
        return [peer for peer in self.peers.values() if peer.is_up]

    def connected(self, peer_id: PeerId) -> list[PeerId]:
        """Return the peers to which a connection is open."""
        return list(self._connections.get(peer_id, ()))

    async def dial(self, caller: PeerId, partner: PeerId, addresses: Sequence[str] = ()) -> PeerId | None:
        """Connect two peers unless connected, and return the relay between them, None if direct. Raises Unreachable after DIAL_S."""
        if not self.is_up(caller) or caller == partner:
            raise Unreachable("this peer is down, or dials itself")
        connections = self._connections.setdefault(caller, {})
        found = ([connections[partner]] if partner in connections else []) + self._routes_to(partner, addresses)
        relays = [relay for relay in found if self._passes(caller, partner, relay) and (relay is None or self.is_up(relay))]
        if relays and self.is_up(partner):
            connections[partner] = self._connections.setdefault(partner, {})[caller] = relays[0]
            return relays[0]
        connections.pop(partner, None)
        is_refused = relays and partner in self.peers  # the machine is up and rejects the connection: the peer is down
        await asyncio.sleep(2 * self.peers[caller].line.link.latency_s if is_refused else DIAL_S)
        raise Unreachable(f"no answer from {partner.short()}")

    def _routes_to(self, partner: PeerId, addresses: Sequence[str]) -> list[PeerId | None]:
        if partner in self.hidden:
            return [relay for relay in self.hidden[partner] if any(f"/p2p/{relay}/p2p-circuit" in address for address in addresses)]
        place = self.places.get(partner, "")
        return [None] if not place or any(address.startswith(place) for address in addresses) else []

    def _passes(self, one: PeerId, other: PeerId, relay: PeerId | None) -> bool:
        return not (self.is_cut(one, other) or (relay is not None and (self.is_cut(one, relay) or self.is_cut(other, relay))))

    async def open(self, caller: MemoryPeer, partner: PeerId, purpose: Purpose, addresses: Sequence[str] = ()) -> Stream:
        """Open a stream from `caller` to `partner`, which takes a round trip. Raises Unreachable."""
        if not caller.is_up:
            raise Unreachable("this peer is down")
        relay = await self.dial(caller.peer_id, partner, addresses)
        host = self.peers[partner]
        conversation = Conversation((caller.peer_id, partner), (caller.line, host.line), self.draw, relay)
        if relay is None:
            for stream, peer in zip(conversation.streams, (partner, caller.peer_id), strict=True):
                stream.observed = self.places.get(peer, "")
        await asyncio.sleep(conversation.round_trip_s())
        if not caller.is_up or not host.is_up:
            raise Unreachable(f"{partner.short()} is down")
        stream = conversation.streams[1]
        connection = host.admission.admit(caller.peer_id, stream.close, lambda: stream.bytes_sent + stream.bytes_received)
        if connection is None or not host.admission.begin_call(connection, purpose):
            if connection is not None:
                host.admission.remove(connection)
            raise Unreachable(f"{partner.short()} rejected the stream")
        conversation.begin()
        spawn(_receive(host, connection, purpose, stream), self._tasks, f"{partner.short()} {purpose.value}")
        return conversation.streams[0]


async def _receive(host: MemoryPeer, connection: InboundConnection, purpose: Purpose, stream: Stream) -> None:
    try:
        if await stream.wait_for_message() and host.admission.note_message(connection):
            await handle(host.handler, purpose, stream)
    finally:
        host.admission.remove(connection)
        stream.close()
