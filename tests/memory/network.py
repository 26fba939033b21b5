"""Transport and directory in memory: many peers in one process, with delay, rates, cuts and deaths.

Messages pass through the real wire code and the real door, so what crosses is bytes, and who may come in is decided as over libp2p. On
a VirtualTimeLoop everything is deterministic: one seed, one schedule. The world of simulated swarms, in tests too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence

from protocol.errors import TransportError, Unreachable
from protocol.identity import PeerId
from protocol.messages.records import MemberRecord
from protocol.streams.admission import Admission, StreamCaps, Visit, handle
from protocol.streams.transport import Purpose, Stream, StreamHandler
from tests.memory.conversation import Conversation, Line, Link

DIAL_S = 5.0
EPOCH_S = 1_700_000_000.0  # Unix time at loop time 0, so that records have dates


class MemoryPeer:
    """One life of a peer on a MemoryNetwork: its Transport and its Directory.

    The directory is the same for all on one side of a cut, at once and without loss. Made by `MemoryNetwork.transport`.
    """

    def __init__(self, network: MemoryNetwork, peer_id: PeerId, link: Link, handler: StreamHandler, admission: Admission) -> None:
        self.peer_id = peer_id
        self.line = Line(link)
        self.handler = handler
        self.admission = admission
        self.is_up = True
        self._network = network

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        """Open a stream to `partner`, which takes a round trip; addresses count where it has a place. Raises Unreachable."""
        return await self._network.open(self, partner, purpose, addresses)

    async def announce(self, record: MemberRecord) -> None:
        """Publish this peer's own record on its side of a cut. Raises TransportError when nobody is there, BadMessage or BadSignature."""
        network = self._network
        record.check(record.run_id, network.now_s())
        await asyncio.sleep(2 * self.line.link.latency_s)
        others = [peer for peer in network.up() if peer is not self]
        if not self.is_up or (others and all(network.is_cut(self.peer_id, peer.peer_id) for peer in others)):
            raise TransportError("nobody took the record", hint="the peer is down or cut off")
        known = network.records.get(record.peer_id)
        if known is None or record.supersedes(known):
            network.records[record.peer_id] = record

    async def members(self) -> list[MemberRecord]:
        """Return the verified, unexpired records that can be reached now. Raises TransportError when this peer is down."""
        await asyncio.sleep(2 * self.line.link.latency_s)
        if not self.is_up:
            raise TransportError("this peer is down")
        now_s, network = self._network.now_s(), self._network
        return [rec for rec in network.records.values() if rec.expires_s > now_s and not network.is_cut(self.peer_id, rec.peer_id)]


class MemoryNetwork:
    """The world between the peers of one event loop. `seed` fixes the jitter; `link` is what a peer gets that brings no own."""

    def __init__(self, seed: int = 0, link: Link | None = None) -> None:
        self._draw = random.Random(seed).random
        self._link = link or Link()
        self.peers: dict[PeerId, MemoryPeer] = {}  # the last life of each, which is its directory too
        self.places: dict[PeerId, str] = {}  # multiaddrs; who has none is reached by its name
        self._group: dict[PeerId, int] = {}
        self.records: dict[PeerId, MemberRecord] = {}  # the last of each
        self._tasks: set[asyncio.Task[None]] = set()

    def transport(
        self,
        peer_id: PeerId,
        handler: StreamHandler,
        link: Link | None = None,
        caps: StreamCaps | None = None,
        is_banned: Callable[[PeerId], bool] = lambda partner: False,
    ) -> MemoryPeer:
        """Bring a peer up; one that is up is killed first (a restart). `is_banned` is asked about everybody who opens a stream to it."""
        self.kill(peer_id)
        self.peers[peer_id] = MemoryPeer(self, peer_id, link or self._link, handler, Admission(caps, is_banned))
        return self.peers[peer_id]

    def now_s(self) -> float:
        """Return Unix time, which follows the loop's clock."""
        return EPOCH_S + asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Cancel every handler that still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what may happen ----

    def is_up(self, peer_id: PeerId) -> bool:
        """Whether the peer lives."""
        return peer_id in self.peers and self.peers[peer_id].is_up

    def kill(self, peer_id: PeerId, *, is_delivered: bool = False) -> None:
        """End a peer at once: its streams end with PeerGone at both ends, what it has under way is lost unless `is_delivered`."""
        if self.is_up(peer_id):
            self.peers[peer_id].is_up = False
            for conversation in list(self.peers[peer_id].line.conversations):
                conversation.die(peer_id, is_delivered=is_delivered)

    def partition(self, *groups: Collection[PeerId]) -> None:
        """Cut every line between peers of different groups; those in none form one more. Replaces the last; no groups mend all."""
        self._group = {peer_id: number for number, group in enumerate(groups, 1) for peer_id in group}
        for peer in self.up():
            for conversation in list(peer.line.conversations):
                conversation.set_cut(self.is_cut(*conversation.peers))

    def is_cut(self, one: PeerId, other: PeerId) -> bool:
        """Whether nothing passes between these two."""
        return self._group.get(one, 0) != self._group.get(other, 0)

    def up(self) -> list[MemoryPeer]:
        """Return the peers that live."""
        return [peer for peer in self.peers.values() if peer.is_up]

    async def open(self, caller: MemoryPeer, partner: PeerId, purpose: Purpose, addresses: Sequence[str] = ()) -> Stream:
        """Open a stream, which takes a round trip. Raises Unreachable."""
        if not caller.is_up or caller.peer_id == partner:
            raise Unreachable("this peer is down, or calls itself")
        place = self.places.get(partner, "")
        is_there = partner in self.peers and (not place or any(address.startswith(place) for address in addresses))
        if not is_there or self.is_cut(caller.peer_id, partner):
            await asyncio.sleep(DIAL_S)
            raise Unreachable(f"no answer from {partner.short()}")
        host = self.peers[partner]
        conversation = Conversation((caller.peer_id, partner), (caller.line, host.line), self._draw)
        await asyncio.sleep(conversation.round_trip_s())
        if not caller.is_up or not host.is_up:
            raise Unreachable(f"{partner.short()} is down")
        stream = conversation.streams[1]
        visit = host.admission.admit(caller.peer_id, stream.hang_up, lambda: stream.bytes_sent + stream.bytes_received)
        if visit is None or not host.admission.begin(visit, purpose):
            if visit is not None:
                host.admission.end(visit)
            raise Unreachable(f"{partner.short()} turned the stream away")
        conversation.begin()
        task = asyncio.create_task(_receive(host, visit, purpose, conversation.streams[1]), name=f"{partner.short()} {purpose.value}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return conversation.streams[0]


async def _receive(host: MemoryPeer, visit: Visit, purpose: Purpose, stream: Stream) -> None:
    try:
        if await stream.arrived() and host.admission.heard(visit):
            await handle(host.handler, purpose, stream)
    finally:
        host.admission.end(visit)
        stream.hang_up()
