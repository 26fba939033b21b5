"""The Directory over Kademlia: a peer stores its record at the members nearest to its own place and samples members near random places.

The directory is for bootstrapping, not a full member list: one look-up returns a handful of records, whatever the size of the swarm. All
other records spread by gossip in meetings.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from gossamer.protocol.errors import BadMessage, TransportError, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.kademlia import KEY_BYTES, RecordProtocol, can_be_called
from gossamer.protocol.libp2p.neighbours import Held, nearest, place_of
from gossamer.protocol.libp2p.record_store import RECORDS_IN_VIEW
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.tasks import cancel

NUM_HOLDERS = 8  # members that store our record
NUM_LOOKED_AT = 3  # members that a random look-up asks
MOST_CALLS = 24  # of one look-up
HOME_S = (20.0, 300.0)  # time between two look-ups of our own place: the first, and the largest after repeated doubling
MIX_S = 30.0  # time between two searches for members among the connected peers
MIXED = 3  # connected peers that one search asks
LEAVE_S = 60.0  # a record without news is stored again at its holders after this long
QUIET_S = (60.0, 600.0)  # a neighbour that was silent for this long is pinged; the second value is for peers that cannot be called
AT_ONCE = 3  # concurrent calls
SLOW_S = 1.0  # a call that takes longer does not count as concurrent
WALK_S = 6.0  # timeout of a look-up
DEAD_HINTS = 2  # peers that did not reply, after which the member that named them is not trusted

Ask = Callable[[Held], Coroutine[Any, Any, list[Held] | None]]


class Walk:
    """An iterative Kademlia look-up of `place`: members near it name nearer ones, until the nearest of all have replied.

    `ask` returns the members that a member names, None if it does not reply. A member that named two peers without reply is not trusted.
    """

    def __init__(self, place: int, ask: Ask) -> None:
        self._place = place
        self._ask = ask
        self._known: dict[PeerId, Held] = {}
        self._named_by: dict[PeerId, set[PeerId | None]] = {}
        self._dead_hints: Counter[PeerId | None] = Counter()
        self._answered: set[PeerId] = set()
        self._failed: set[PeerId] = set()
        self._asking: dict[asyncio.Task[list[Held] | None], tuple[Held, float]] = {}  # with the member, and the loop time of the call

    async def run(self, first: Iterable[Held], num_nearest: int, most_calls: int) -> list[Held]:
        """Look up from `first`, for at most WALK_S and `most_calls` calls; return the nearest members that replied. Cancel-safe."""
        self._learn(first, None)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(WALK_S):
                    await self._walk(num_nearest, most_calls)
        finally:
            await cancel(*self._asking)
        return self._sorted(self._answered)[:num_nearest]

    async def _walk(self, num_nearest: int, most_calls: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            slow = {held.peer for held, since_s in self._asking.values() if loop.time() - since_s >= SLOW_S}
            goal = self._sorted(peer for peer in self._known if peer not in slow and self._is_credible(peer))[:num_nearest]
            if all(held.peer in self._answered for held in goal):
                return
            asked = {held.peer for held, _ in self._asking.values()}
            for held in goal:
                if held.peer not in self._answered | asked and len(self._asking) - len(slow) < AT_ONCE and most_calls > 0:
                    self._asking[asyncio.create_task(self._ask(held), name="directory call")] = held, loop.time()
                    most_calls -= 1
            if not self._asking:
                return
            done, _ = await asyncio.wait(self._asking, timeout=SLOW_S / 4, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._take_reply(self._asking.pop(task)[0].peer, task.result())

    def _take_reply(self, peer: PeerId, named: list[Held] | None) -> None:
        if named is None:
            self._failed.add(peer)
            self._dead_hints.update(self._named_by[peer])
        else:
            self._answered.add(peer)
            self._learn(named, peer)

    def _learn(self, named: Iterable[Held], source: PeerId | None) -> None:
        for held in named:
            self._known.setdefault(held.peer, held)
            self._named_by.setdefault(held.peer, set()).add(source)

    def _is_credible(self, peer: PeerId) -> bool:
        """Return whether a peer has replied, or is not queried yet and was named by a trusted member."""
        if peer in self._answered or peer in self._failed:
            return peer in self._answered
        return any(source is None or self._dead_hints[source] < DEAD_HINTS for source in self._named_by[peer])

    def _sorted(self, peers: Iterable[PeerId]) -> list[Held]:
        return [self._known[peer] for peer in sorted(peers, key=lambda peer: place_of(peer) ^ self._place)]


class DhtDirectory:
    """The directory over one p2pd. Every call has its own timeout and is cancel-safe."""

    def __init__(self, rpc: RecordProtocol) -> None:
        self._rpc = rpc
        self._record_store = rpc.record_store
        self._home_at_s = 0.0  # loop time of the next look-up of our own place
        self._home_every_s = HOME_S[0]
        self._left: dict[PeerId, tuple[MemberRecord, float]] = {}  # holder -> our record that it has, and the loop time of storing
        self._mix_at_s = 0.0

    async def open(self) -> None:
        """Start serving the directory's RPCs."""
        await self._rpc.open()

    @property
    def num_neighbours(self) -> int:
        """Number of members in the routing table."""
        return len(self._rpc.neighbours)

    def is_calling(self, peer: PeerId) -> bool:
        """Return whether a directory call of ours to a peer is in flight."""
        return self._rpc.is_calling(peer)

    async def join(self, peers: Iterable[PeerId]) -> int:
        """Ping connected `peers` and return how many of them are members; 0 while we have no record to present."""
        if self._rpc.own_record() is None:
            return 0
        known = {record.peer_id for record in self._record_store.records()}
        answers = await asyncio.gather(*(self._rpc.call_ping(peer) for peer in peers))
        members = [held for held in answers if held is not None]
        if len(known) < RECORDS_IN_VIEW and any(held.peer not in known for held in members):
            self._leave_home()  # a new member may know further unknown members near our place
        return len(members)

    async def maintain(self) -> None:
        """Ping the neighbour silent the longest, and try connected peers, which reunites a partitioned directory. Raises Unreachable."""
        if self._rpc.clock() >= self._mix_at_s:
            self._mix_at_s = self._rpc.clock() + MIX_S
            ends = await self._rpc.dialer.connected()
            hidden = {record.peer_id for record in self._record_store.records() if not can_be_called(record, ends.get(record.peer_id, ""))}
            others = [peer for peer in ends if peer not in hidden | {held.peer for held in self._rpc.neighbours.all()}]
            await self.join(self._record_store.rng.sample(others, min(len(others), MIXED)))
        own_record = self._rpc.own_record()
        quiet = self._rpc.neighbours.quietest(QUIET_S[own_record is not None and not can_be_called(own_record.record)])
        if quiet is not None and await self._rpc.call_ping(quiet.peer, quiet.record.addresses) is None:
            self._rpc.neighbours.lost(quiet.peer)

    async def announce(self, record: MemberRecord) -> None:
        """Store this peer's own record at the members nearest to its place: at once if it has news, else again after LEAVE_S.

        Raises TransportError if members are known and none of them stores it, BadMessage if it is invalid by our clock.
        """
        if self._record_store.keep_latest(record.to_bytes()) is None:
            raise BadMessage("the record has expired, is not of a member, or is not signed", hint="check this machine's clock")
        self._rpc.own = record
        await self._need_company()
        known = self.num_neighbours
        near = await self._nearest_members()
        behind = [member for member in near if not self._has(member.peer, record)]
        held = await asyncio.gather(*(self._rpc.call_store(member, record.to_bytes()) for member in behind))
        now = record, self._rpc.clock()
        self._left = {member.peer: self._left[member.peer] for member in near if member not in behind}
        self._left |= {member.peer: now for member, is_held in zip(behind, held, strict=True) if is_held}
        if not all(held):
            self._leave_home()  # other members are now nearest instead of those that failed
        if not self._left and (known or near):
            raise TransportError(
                f"none of {max(known, len(near))} directory nodes stored our record",
                hint="check this machine's clock: records more than 30 s ahead are refused",
            )

    async def members(self) -> list[MemberRecord]:
        """Look up a random place and return all known valid records. Raises Unreachable if p2pd has ended."""
        await self._need_company()
        await self._walk(self._record_store.rng.getrandbits(8 * KEY_BYTES), NUM_LOOKED_AT)
        return self._record_store.records()

    def _has(self, peer: PeerId, record: MemberRecord) -> bool:
        """Return whether a holder's copy of our record is recent enough: it has the same content and expires no later."""
        if peer not in self._left:
            return False
        left, at_s = self._left[peer]
        return self._rpc.clock() < at_s + LEAVE_S and left.gist == record.gist and left.expires_s <= record.expires_s

    async def _nearest_members(self) -> list[Held]:
        """Return the members nearest to our place, after a look-up of our place if one is due."""
        place = place_of(self._rpc.me)
        if self._rpc.clock() >= self._home_at_s:
            await self._walk(place, NUM_HOLDERS)
            self._home_at_s = self._rpc.clock() + self._home_every_s
            self._home_every_s = min(2 * self._home_every_s, HOME_S[1])
        return nearest(self._rpc.neighbours.all(), place, NUM_HOLDERS)

    def _leave_home(self) -> None:
        self._home_at_s, self._home_every_s = 0.0, HOME_S[0]

    async def _walk(self, place: int, num_nearest: int) -> list[Held]:
        walk = Walk(place, lambda held: self._rpc.call_find(held, place))
        return await walk.run(self._rpc.neighbours.all(), num_nearest, MOST_CALLS)

    async def _need_company(self) -> None:
        if self._rpc.p2p.is_broken:
            raise Unreachable("the connection to p2pd has ended")
        if not self.num_neighbours:
            connected = list(await self._rpc.dialer.connected())
            await self.join(self._record_store.rng.sample(connected, min(len(connected), MOST_CALLS)))
