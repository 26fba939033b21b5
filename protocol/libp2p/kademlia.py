"""The directory's RPCs: members tell each other who is near a place of Kademlia's space, by signed records.

The framing is hivemind's, but what a stranger sends is bounded before it is looked at, and every answer is paid from a budget. Each call
shows its caller's own record: whoever shows none of a member gets a pong and nothing else, and is not remembered. A node's place is the
hash of its peer id, not of its choice. Nobody looks for a certain key: what is asked for is whoever is near a random one.

Records are in force between absolute times. What time it is, `RecordShelf.now` says, which goes by partners where this machine's clock is
wrong (peer/swarm/swarm_time.py); hivemind's own answer, not to start at all when clocks differ by 3 s, is not taken over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, Self

from google.protobuf.message import DecodeError

from gossamer.protocol.addresses import network_of, route
from gossamer.protocol.budgets import Allowance, Budgets
from gossamer.protocol.errors import BadMessage, GossamerError, TransportError, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.dialling import Dialling
from gossamer.protocol.libp2p.hivemind_imports import DHTProtocol, P2PContext, P2PDaemonError, P2PHandlerError, PeerID, dht_pb2
from gossamer.protocol.libp2p.neighbours import Held, Holdings, Neighbours, nearest
from gossamer.protocol.libp2p.record_store import RecordShelf, join_records, split_answer, told
from gossamer.protocol.messages.records import MemberRecord

log = logging.getLogger(__name__)

KEY_BYTES = 20
NAMED = 8  # neighbours in an answer
NAMED_TOO = 4  # others who have left their records here
KNOWN = 16  # records that an asker says it has, so that they are named by their gist
CALL_S = 3.0
CALL_BYTES = 400  # what an answer costs beside its records
IN_ALL = Allowance(1e6, 7.8125)  # bytes that we answer with: 128 kB/s
PER_PEER = Allowance(64e3, 8.0)  # a look takes three answers of 8 kB of three peers, every 20 s at most
PER_NETWORK = Allowance(256e3, 8.0)
CONNECTIONS_S = 1.0  # for which the list of open connections is taken as true


class Overload(GossamerError):
    """A caller asks for more than it, its network, or everybody together gets."""


class RecordProtocol(DHTProtocol):  # type: ignore[misc]
    """One node's RPCs. `card` returns this peer's own record, to show to others: None while it has none."""

    _rpc_handlers = None  # not to share the parent's
    _stub_type = None
    shelf: RecordShelf
    _ends: dict[PeerId, str]  # of open connections
    _ends_at_s: float

    @classmethod
    async def open(cls, p2p: Any, shelf: RecordShelf, lines: Dialling, card: Callable[[], Held | None]) -> Self:
        """Serve from now on."""
        self: Self = cls(_initialized_with_create=True)
        me, clock = PeerId(p2p.peer_id.to_bytes()), asyncio.get_running_loop().time
        self.p2p, self.shelf, self.client_mode, self.authorizer = p2p, shelf, False, None
        self.neighbours = Neighbours(me, clock, shelf.rng)
        self.holdings = Holdings(me)
        self._lines = lines
        self._card = card
        self._budgets = Budgets(clock, IN_ALL, PER_PEER, PER_NETWORK)
        self._clock = clock
        self._ends, self._ends_at_s = {}, -CONNECTIONS_S
        await self.add_p2p_handlers(p2p)
        return self

    # ---- what others ask ----

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Say that we are here; to a member, who we are."""
        caller, _ = await self._hear(request.peer, context, CALL_BYTES)
        return dht_pb2.PingResponse(peer=self._node_info() if caller else None, dht_time=self.shelf.now())

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Hold the caller's own record."""
        caller, end = await self._hear(request.peer, context, CALL_BYTES)
        return dht_pb2.StoreResponse(store_ok=[caller is not None and self.holdings.put(caller, network_of(end), self.shelf.now())])

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Return records of members near a place: neighbours of ours, and others who have left theirs here."""
        caller, end = await self._hear(request.peer, context, CALL_BYTES)
        if caller is None:
            raise BadMessage("only members of the run are told who is there")
        place, *known = request.keys or [b""]
        if len(place) != KEY_BYTES or len(known) > KNOWN:
            raise BadMessage(f"one place at a time, of {KEY_BYTES} bytes, and {KNOWN} gists at most")
        value = join_records(self._near(int.from_bytes(place, "big"), caller.peer), known)
        self._charge(caller.peer, end, len(value))
        return dht_pb2.FindResponse(results=[dht_pb2.FindResult(type=dht_pb2.FOUND_REGULAR, value=value)], peer=self._node_info(known))

    def _near(self, place: int, caller: PeerId) -> list[Held]:
        known = [held for held in self.neighbours.all() if held.peer != caller and self.shelf.is_in_force(held)]
        named = {held.peer: held for held in nearest(known, place, NAMED)}
        left = [held for held in self.holdings.all() if held.peer not in named and held.peer != caller and self.shelf.is_in_force(held)]
        return [*named.values(), *nearest(left, place, NAMED_TOO)]

    async def _hear(self, info: Any, context: P2PContext, num_bytes: int) -> tuple[Held | None, str]:
        """Take the cost of an answer from the caller's budget; return its record, if it shows a member's, and where it calls from."""
        caller = PeerId(context.remote_id.to_bytes())  # only Ed25519 peers are ours
        end = await self._end_of(caller)
        self._charge(caller, end, num_bytes)
        return self._shown(caller, self.shelf.read(info.node_id), end), end

    def _charge(self, caller: PeerId, end: str, num_bytes: int) -> None:
        """Raise Overload where the budgets of a caller that calls from `end` do not have so much. On a local network each is one."""
        network = str(caller) if end and route(end) == "local" else network_of(end)
        if not self._budgets.take(num_bytes, caller, network):
            raise Overload("this peer, its network, or all together have been answered enough lately")

    async def _end_of(self, peer: PeerId) -> str:
        """Return the multiaddr at the other end of the connection to a peer; empty where it is not known."""
        if peer not in self._ends and self._clock() - self._ends_at_s >= CONNECTIONS_S:
            self._ends_at_s = self._clock()
            try:
                self._ends = await self._lines.connected()
            except Unreachable:
                self._ends = {}
        return self._ends.get(peer, "")

    def _node_info(self, known: Collection[bytes] = ()) -> Any:
        """Show who we are, to one that has what is `known`."""
        card = self._card()
        return dht_pb2.NodeInfo(node_id=told(card, known) if card is not None else b"")

    # ---- what we ask ----

    async def call_ping(self, peer: PeerId, addresses: Sequence[str] = ()) -> Held | None:
        """Return the record that a peer shows us; None when it does not answer, or shows none of a member."""
        response = await self._call(peer, addresses, "rpc_ping", dht_pb2.PingRequest(peer=self._node_info()))
        return None if response is None else self._shown(peer, self.shelf.read(response.peer.node_id), await self._end_of(peer))

    async def call_find(self, held: Held, place: int) -> list[Held] | None:
        """Ask a member whom it knows near a place. None: no answer."""
        known = {one.record.gist: one for one in (held, *self.shelf.lasting(place, KNOWN - 1)) if self.shelf.is_lasting(one)}
        request = dht_pb2.FindRequest(keys=[place.to_bytes(KEY_BYTES, "big"), *known], peer=self._node_info())
        response = await self._call(held.peer, held.record.addresses, "rpc_find", request)
        if response is None or len(response.results) != 1:
            return None
        shown = response.peer.node_id
        self._shown(held.peer, known.get(shown) or self.shelf.read(shown), await self._end_of(held.peer))
        named = []
        for data in islice(split_answer(response.results[0].value), NAMED + NAMED_TOO):
            if (one := known.get(data) or self.shelf.read(data)) is not None:
                named.append(one)
            await asyncio.sleep(0)  # signatures take 0.3 ms to check
        return [one for one in named if can_be_called(one.record)]

    async def call_store(self, held: Held, own: bytes) -> bool:
        """Return whether a member says that it holds this record of ours now."""
        request = dht_pb2.StoreRequest(peer=dht_pb2.NodeInfo(node_id=own))
        response = await self._call(held.peer, held.record.addresses, "rpc_store", request)
        return response is not None and list(response.store_ok) == [True]

    def _shown(self, peer: PeerId, held: Held | None, end: str) -> Held | None:
        """Return the record that a peer shows of itself, a neighbour from now on if it can be called; None where it shows no member's."""
        if held is None or held.peer != peer:
            return None
        if can_be_called(held.record, end):
            self.neighbours.heard(held, network_of(end))
        return held

    async def _call(self, peer: PeerId, addresses: Sequence[str], method: str, request: Any) -> Any:
        """Return the peer's answer, None when there is none in time; who does not answer is no neighbour any more."""
        try:
            async with asyncio.timeout(CALL_S):
                if addresses:
                    await self._lines.connect(peer, addresses)
                return await getattr(self.get_stub(PeerID(peer.raw)), method)(request)
        except P2PHandlerError as error:  # it is there, and does not want to
            log.debug("%s at %s: %r", method, peer, error)
        except (TransportError, P2PDaemonError, OSError, DecodeError) as error:  # OSError: the time-out too
            log.debug("%s at %s: %r", method, peer, error)
            self.neighbours.lost(peer)
        return None


def can_be_called(record: MemberRecord, end: str = "") -> bool:
    """Whether a member can be called without a relay, as far as one sees: at a public address, or, seen from near by, at any of its own."""
    direct = [address for address in record.addresses if route(address) != "relayed"]
    return any(route(address) == "direct" for address in direct) or (bool(direct) and (not end or route(end) == "local"))
