"""One peer's part of the directory: it leaves its record with the members nearest to its place, and looks around at random ones.

The directory is a door, not a map: a look brings a handful of records, whatever the size of the swarm, and what is known beyond that goes
from peer to peer at meetings. Only hints come out (`transport.Directory`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from gossamer.protocol.errors import BadMessage, TransportError, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.attached import AttachedP2P
from gossamer.protocol.libp2p.dialling import Dialling
from gossamer.protocol.libp2p.kademlia import KEY_BYTES, RecordProtocol, can_be_called
from gossamer.protocol.libp2p.neighbours import Held, nearest, place_of
from gossamer.protocol.libp2p.record_store import RECORDS_IN_VIEW, RecordShelf
from gossamer.protocol.libp2p.walk import Walk
from gossamer.protocol.messages.records import MemberRecord

NUM_HOLDERS = 8
NUM_LOOKED_AT = 3
MOST_CALLS = 24  # of one walk
HOME_S = (20.0, 300.0)  # between two walks to our own place: at first, and after more and more of them
MIX_S = 30.0  # between two looks for members among those to whom a connection is open
MIXED = 3  # asked then
LEAVE_S = 60.0  # a record that says nothing new is left with who holds the last one after so long
QUIET_S = (60.0, 600.0)  # a neighbour that was not heard for so long is asked whether it is there; by who is never asked for them
CARD_LEFT_S = 10.0  # a record that ends sooner is not shown any more


class DhtDirectory:
    """Over one p2pd. `bare` signs a record that shows who we are before we have announced ourselves; None while we cannot.

    Every call ends in time by itself; all are cancel-safe.
    """

    def __init__(self, p2p: AttachedP2P, shelf: RecordShelf, lines: Dialling, bare: Callable[[], MemberRecord | None]) -> None:
        self._p2p = p2p
        self._shelf = shelf
        self._lines = lines
        self._bare = bare
        self._own: MemberRecord | None = None
        self._home_at_s = 0.0  # loop time at which we walk to our own place again
        self._home_every_s = HOME_S[0]
        self._left: dict[PeerId, tuple[MemberRecord, float]] = {}  # which record those who hold ours have, and since when (loop time)
        self._mix_at_s = 0.0

    async def open(self) -> None:
        """Answer from now on."""
        self._protocol = await RecordProtocol.open(self._p2p, self._shelf, self._lines, self._card)
        self._me = PeerId(self._p2p.peer_id.to_bytes())
        self._loop = asyncio.get_running_loop()

    @property
    def num_neighbours(self) -> int:
        """How many members of the directory are known to be alive."""
        return len(self._protocol.neighbours)

    async def join(self, peers: Iterable[PeerId]) -> int:
        """Get to know members through connected `peers`; return how many of these are members: none while we cannot show who we are."""
        if self._card() is None:
            return 0
        known = {record.peer_id for record in self._shelf.records()}
        answers = await asyncio.gather(*(self._protocol.call_ping(peer) for peer in peers))
        members = [held for held in answers if held is not None]
        if len(known) < RECORDS_IN_VIEW and any(held.peer not in known for held in members):
            self._leave_home()  # they know others of whom we have not heard either, some of them near our place
        return len(members)

    async def tend(self) -> None:
        """See whether the neighbour that was not heard for the longest is still there, and who else may be one; call now and then.

        Halves of a directory that a cut has parted are one again by those who have a connection to the other. Raises Unreachable.
        """
        if self._loop.time() >= self._mix_at_s:
            self._mix_at_s = self._loop.time() + MIX_S
            ends = await self._lines.connected()
            hidden = {record.peer_id for record in self._shelf.records() if not can_be_called(record, ends.get(record.peer_id, ""))}
            others = [peer for peer in ends if peer not in hidden | {held.peer for held in self._protocol.neighbours.all()}]
            await self.join(self._shelf.rng.sample(others, min(len(others), MIXED)))
        card = self._card()
        quiet = self._protocol.neighbours.quietest(QUIET_S[card is not None and not can_be_called(card.record)])
        if quiet is not None and await self._protocol.call_ping(quiet.peer, quiet.record.addresses) is None:
            self._protocol.neighbours.lost(quiet.peer)

    async def announce(self, record: MemberRecord) -> None:
        """Have this peer's own record held by the members nearest to its place; a later one, by its sequence, replaces it.

        One that says the same as what they hold is brought to them after a minute, and shown meanwhile to whom we call. Raises
        TransportError when others are there and none of them holds it now, BadMessage when it is not in force by our clock.
        """
        if self._shelf.read(record.to_bytes()) is None:
            raise BadMessage("the record is out of date, not ours to publish, or not signed", hint="check this machine's clock")
        self._own = record
        await self._need_company()
        known = self.num_neighbours
        near = await self._near_home()
        behind = [member for member in near if not self._has(member.peer, record)]
        held = await asyncio.gather(*(self._protocol.call_store(member, record.to_bytes()) for member in behind))
        now = record, self._loop.time()
        self._left = {member.peer: self._left[member.peer] for member in near if member not in behind}
        self._left |= {member.peer: now for member, is_held in zip(behind, held, strict=True) if is_held}
        if not all(held):
            self._leave_home()  # whoever has gone, others are near in its place
        if not self._left and (known or near):
            raise TransportError(
                f"none of {max(known, len(near))} directory nodes took our record",
                hint="check this machine's clock: records more than 30 s ahead are refused",
            )

    async def members(self) -> list[MemberRecord]:
        """Look around at a random place; return the records in force that are known now. Raises Unreachable when p2pd is gone."""
        await self._need_company()
        await self._walk(self._shelf.rng.getrandbits(8 * KEY_BYTES), NUM_LOOKED_AT)
        return self._shelf.records()

    def _has(self, peer: PeerId, record: MemberRecord) -> bool:
        """Whether a peer needs not be brought this record of ours yet: what it has says the same, and no longer."""
        if peer not in self._left:
            return False
        left, at_s = self._left[peer]
        return self._loop.time() < at_s + LEAVE_S and left.gist == record.gist and left.expires_s <= record.expires_s

    async def _near_home(self) -> list[Held]:
        """Return the members nearest to our place, to which we walk now and then."""
        place = place_of(self._me)
        if self._loop.time() >= self._home_at_s:
            await self._walk(place, NUM_HOLDERS)
            self._home_at_s = self._loop.time() + self._home_every_s
            self._home_every_s = min(2 * self._home_every_s, HOME_S[1])
        return nearest(self._protocol.neighbours.all(), place, NUM_HOLDERS)

    def _leave_home(self) -> None:
        self._home_at_s, self._home_every_s = 0.0, HOME_S[0]

    async def _walk(self, place: int, num_nearest: int) -> list[Held]:
        walk = Walk(place, lambda held: self._protocol.call_find(held, place))
        return await walk.run(self._protocol.neighbours.all(), num_nearest, MOST_CALLS)

    async def _need_company(self) -> None:
        if self._p2p.is_broken:
            raise Unreachable("the connection to p2pd has ended")
        if not self.num_neighbours:
            connected = list(await self._lines.connected())
            await self.join(self._shelf.rng.sample(connected, min(len(connected), MOST_CALLS)))

    def _card(self) -> Held | None:
        """Return the record that we show to whom we call: the one announced last, or a bare one before there is any."""
        if self._own is None or self._own.expires_s < self._shelf.now() + CARD_LEFT_S:
            self._own = self._bare()
        return Held(self._own, self._own.to_bytes()) if self._own is not None else None
