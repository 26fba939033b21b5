"""Transport and directory in memory: many peers in one process, with delay, rates, cuts and deaths by script.

Messages pass through the real wire code, so what crosses is bytes. On a VirtualTimeLoop everything is deterministic: one seed, one
schedule. The second implementation of `transport.py`, and the world of the simulator and of most tests.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from protocol.errors import TransportError, Unreachable
from protocol.identity import PeerId
from protocol.memory.link import Doom, Line, Link
from protocol.memory.stream import Conversation
from protocol.messages.records import MemberRecord
from protocol.streams.admission import Admission, StreamCaps, Visit, handle
from protocol.streams.transport import Purpose, Stream, StreamHandler

DIAL_S = 5.0
EPOCH_S = 1_700_000_000.0  # Unix time at loop time 0, so that records have dates


@dataclass(slots=True)
class _Host:
    """A peer that is up."""

    line: Line
    handler: StreamHandler
    admission: Admission
    refuses: bool = False
    conversations: dict[Conversation, None] = field(default_factory=dict)  # a set would be walked in the order of addresses


class MemoryNetwork:
    """The world between the peers of one event loop. `seed` fixes the jitter; `link` is what a peer gets that brings no own."""

    def __init__(self, seed: int = 0, link: Link | None = None) -> None:
        self._draw = random.Random(seed).random
        self._link = link or Link()
        self._hosts: dict[PeerId, _Host] = {}
        self._lines: dict[PeerId, Line] = {}
        self._group: dict[PeerId, int] = {}
        self._records: dict[PeerId, MemberRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_death: list[Callable[[PeerId], None]] = []

    # ---- peers ----

    def transport(
        self,
        peer_id: PeerId,
        handler: StreamHandler,
        link: Link | None = None,
        caps: StreamCaps | None = None,
        is_banned: Callable[[PeerId], bool] = lambda partner: False,
    ) -> MemoryTransport:
        """Bring a peer up; one that is up is killed first (a restart). `is_banned` is asked about everybody who opens a stream to it."""
        self.kill(peer_id)
        self._lines[peer_id] = Line(link or self._link)
        self._hosts[peer_id] = _Host(self._lines[peer_id], handler, Admission(caps, is_banned))
        return MemoryTransport(self, peer_id)

    def directory(self, peer_id: PeerId) -> MemoryDirectory:
        """Return the directory as this peer sees it."""
        return MemoryDirectory(self, peer_id)

    def now_s(self) -> float:
        """Return Unix time, which follows the loop's clock."""
        return EPOCH_S + asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Cancel every handler that still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- the script ----

    def kill(self, peer_id: PeerId, *, is_delivered: bool = False) -> None:
        """End a peer at once: its streams end with PeerGone at both ends, what it has under way is lost unless `is_delivered`."""
        host = self._hosts.pop(peer_id, None)
        if host is None:
            return
        for conversation in list(host.conversations):
            conversation.die(peer_id, is_delivered=is_delivered)
        for tell in self._on_death:
            tell(peer_id)

    def kill_at(self, peer_id: PeerId, *, sent: int | None = None, received: int | None = None, is_delivered: bool = False) -> None:
        """Kill a peer when it sends its k-th message, or when its k-th arrives; counted from when it came up. See Doom."""
        self._lines[peer_id].dooms.append(Doom(sent, received, is_delivered))

    def on_death(self, tell: Callable[[PeerId], None]) -> None:
        """Have `tell` called when a peer is killed, before anything else of it runs: to cancel its tasks."""
        self._on_death.append(tell)

    def refuse(self, peer_id: PeerId, refuses: bool = True) -> None:
        """Have a peer turn away every new stream, or accept them again."""
        self._hosts[peer_id].refuses = refuses

    def partition(self, *groups: Collection[PeerId]) -> None:
        """Cut every line between peers of different groups; those in none form one more. Replaces what was cut before."""
        self._group = {peer_id: number for number, group in enumerate(groups, 1) for peer_id in group}
        for host in self._hosts.values():
            for conversation in list(host.conversations):
                conversation.set_cut(self.is_cut(*conversation.peers))

    def heal(self) -> None:
        """Mend every line."""
        self.partition()

    def is_cut(self, one: PeerId, other: PeerId) -> bool:
        """Whether nothing passes between these two."""
        return self._group.get(one, 0) != self._group.get(other, 0)

    # ---- what transports and directories ask ----

    def is_up(self, peer_id: PeerId) -> bool:
        """Whether the peer lives."""
        return peer_id in self._hosts

    async def open(self, caller: PeerId, partner: PeerId, purpose: Purpose) -> Stream:
        """Open a stream, which takes a round trip. Raises Unreachable."""
        if caller not in self._hosts or caller == partner:
            raise Unreachable("this peer is down, or calls itself")
        if partner not in self._lines or self.is_cut(caller, partner):
            await asyncio.sleep(DIAL_S)
            raise Unreachable(f"no answer from {partner.short()}")
        conversation = Conversation((caller, partner), (self._lines[caller], self._lines[partner]), self._draw, self._struck)
        await asyncio.sleep(conversation.round_trip_s())
        return self._admit(conversation, purpose)

    def _admit(self, conversation: Conversation, purpose: Purpose) -> Stream:
        caller, partner = conversation.peers
        host = self._hosts.get(partner)
        if caller not in self._hosts or host is None:
            raise Unreachable(f"{partner.short()} is down")
        visit = None if host.refuses else host.admission.admit(caller, conversation.streams[1].hang_up)
        if visit is None or not host.admission.begin(visit, purpose):
            if visit is not None:
                host.admission.end(visit)
            raise Unreachable(f"{partner.short()} turned the stream away")
        for end in (host, self._hosts[caller]):
            end.conversations[conversation] = None
        conversation.on_over(0, lambda: self._forget(conversation, caller))
        conversation.on_over(1, lambda: self._forget(conversation, partner))
        task = asyncio.create_task(self._receive(host, visit, purpose, conversation.streams[1]), name=f"{partner.short()} {purpose.value}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return conversation.streams[0]

    async def _receive(self, host: _Host, visit: Visit, purpose: Purpose, stream: Stream) -> None:
        try:
            if await stream.arrived() and host.admission.heard(visit):
                await handle(host.handler, purpose, stream)
        finally:
            host.admission.end(visit)
            stream.hang_up()

    def _forget(self, conversation: Conversation, peer_id: PeerId) -> None:
        if host := self._hosts.get(peer_id):
            host.conversations.pop(conversation, None)

    def _struck(self, peer_id: PeerId, doom: Doom) -> None:
        self.kill(peer_id, is_delivered=doom.is_delivered)

    # ---- records ----

    async def publish(self, author: PeerId, record: MemberRecord) -> None:
        """Keep a record where those on the author's side of a cut find it. Raises TransportError when nobody is there to take it."""
        record.check(record.run_id, self.now_s())
        await asyncio.sleep(2 * self._lines[author].link.latency_s)
        others = [peer for peer in self._hosts if peer != author]
        if author not in self._hosts or (others and all(self.is_cut(author, peer) for peer in others)):
            raise TransportError("nobody took the record", hint="the peer is down or cut off")
        known = self._records.get(record.peer_id)
        if known is None or record.supersedes(known):
            self._records[record.peer_id] = record

    async def published(self, reader: PeerId) -> list[MemberRecord]:
        """Return the records in force that a peer can reach."""
        await asyncio.sleep(2 * self._lines[reader].link.latency_s)
        if reader not in self._hosts:
            raise TransportError("this peer is down")
        return [rec for rec in self._records.values() if rec.expires_s > self.now_s() and not self.is_cut(reader, rec.peer_id)]


class MemoryTransport:
    """A peer's streams over a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId) -> None:
        self._network = network
        self._peer_id = peer_id

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        """Open a stream to `partner`; addresses mean nothing here. Raises Unreachable."""
        return await self._network.open(self._peer_id, partner, purpose)


class MemoryDirectory:
    """A peer's view of the records of a MemoryNetwork: the same for all on its side of a cut, at once and without loss."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId) -> None:
        self._network = network
        self._peer_id = peer_id

    async def announce(self, record: MemberRecord) -> None:
        """Publish this peer's own record. Raises TransportError when nobody is there to take it, BadMessage when it is out of date."""
        await self._network.publish(self._peer_id, record)

    async def members(self) -> list[MemberRecord]:
        """Return the verified, unexpired records that can be reached now. Raises TransportError when this peer is down."""
        return await self._network.published(self._peer_id)
