"""The directory's RPCs: members return each other signed records of members near a place in Kademlia's key space.

The framing is hivemind's. Sizes are checked before parsing, and each reply is charged to a rate limit. Each call presents its caller's own
record; a caller without a member's record gets only a pong. `RecordStore.now` follows the swarm's time if this machine's clock is wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from google.protobuf.message import DecodeError

from gossamer.protocol.addresses import network_of, route
from gossamer.protocol.budgets import Allowance, Budgets
from gossamer.protocol.errors import BadMessage, GossamerError, TransportError, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.dialer import Dialer
from gossamer.protocol.libp2p.hivemind_imports import P2PContext, P2PDaemonError, P2PHandlerError, PeerID, dht_pb2
from gossamer.protocol.libp2p.neighbours import Held, Holdings, Neighbours, nearest
from gossamer.protocol.libp2p.p2pd import AttachedP2P
from gossamer.protocol.libp2p.record_store import RecordStore, gist_if_known, join_records, split_reply
from gossamer.protocol.messages.records import MemberRecord

log = logging.getLogger(__name__)

SERVICE = "RecordProtocol"  # prefix of the RPCs' names on the wire
KEY_BYTES = 20
NAMED = 8  # neighbours in a reply
NAMED_TOO = 4  # stored records in a reply
KNOWN = 16  # records that a caller may declare as known; the reply contains only their gists
CALL_S = 3.0  # timeout of a call
CALL_BYTES = 400  # cost of a reply without its records
IN_ALL = Allowance(1e6, 7.8125)  # bytes of replies: 128 kB/s
PER_PEER = Allowance(64e3, 8.0)  # a look-up takes one reply of 8 kB from each of three peers, at most every 20 s
PER_NETWORK = Allowance(256e3, 8.0)
CARD_LEFT_S = 10.0  # a record that expires sooner is replaced before it is presented
CONNECTIONS_S = 1.0  # maximum age of the cached list of connections, for a peer that it does not name
ENDS_S = 60.0  # and for one that it names, which may have come back from another network


class Overload(GossamerError):
    """The rate limit of a caller, of its network or of all callers together is exceeded."""


class RecordProtocol:
    """A node's RPCs, as server and client. `bare` returns a record for the time before the first announcement, None without membership."""

    def __init__(self, p2p: AttachedP2P, record_store: RecordStore, dialer: Dialer, bare: Callable[[], MemberRecord | None]) -> None:
        self.p2p = p2p
        self.record_store = record_store
        self.dialer = dialer
        self.me = PeerId(p2p.peer_id.to_bytes())
        self.clock = asyncio.get_running_loop().time
        self.neighbours = Neighbours(self.me, self.clock, record_store.rng)
        self.holdings = Holdings(self.me)
        self.own: MemberRecord | None = None  # the last announced record
        self._bare = bare
        self._budgets = Budgets(self.clock, IN_ALL, PER_PEER, PER_NETWORK)
        self._calling: Counter[PeerId] = Counter()  # our calls in flight
        self._ends: dict[PeerId, str] = {}  # remote multiaddrs of the connected peers
        self._ends_at_s = -CONNECTIONS_S  # loop time of that list

    def own_record(self) -> Held | None:
        """Return the record that our calls present: the last announced one, or a bare one before the first announcement."""
        if self.own is None or self.own.expires_s < self.record_store.now() + CARD_LEFT_S:
            self.own = self._bare()
        return Held(self.own, self.own.to_bytes()) if self.own is not None else None

    async def open(self) -> None:
        """Start serving the RPCs."""
        await self.p2p.add_protobuf_handler(f"{SERVICE}.rpc_ping", self.rpc_ping, dht_pb2.PingRequest)
        await self.p2p.add_protobuf_handler(f"{SERVICE}.rpc_store", self.rpc_store, dht_pb2.StoreRequest)
        await self.p2p.add_protobuf_handler(f"{SERVICE}.rpc_find", self.rpc_find, dht_pb2.FindRequest)

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Reply to a ping. A member's ping also gets our own record."""
        caller, _ = await self._admit(request.peer, context, CALL_BYTES)
        return dht_pb2.PingResponse(peer=self._node_info() if caller else None, dht_time=self.record_store.now())

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Store the caller's own record."""
        caller, end = await self._admit(request.peer, context, CALL_BYTES)
        return dht_pb2.StoreResponse(store_ok=[caller is not None and self.holdings.put(caller, network_of(end), self.record_store.now())])

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Return records of members near a place: from the routing table, and records stored here."""
        caller, end = await self._admit(request.peer, context, CALL_BYTES)
        if caller is None:
            raise BadMessage("only members of the run may look up records")
        place, *known = request.keys or [b""]
        if len(place) != KEY_BYTES or len(known) > KNOWN:
            raise BadMessage(f"a look-up takes one place of {KEY_BYTES} bytes and at most {KNOWN} gists")
        value = join_records(self._near(int.from_bytes(place, "big"), caller), known)
        self._charge(caller.peer, end, len(value))
        return dht_pb2.FindResponse(results=[dht_pb2.FindResult(type=dht_pb2.FOUND_REGULAR, value=value)], peer=self._node_info(known))

    def _near(self, place: int, caller: Held) -> list[Held]:
        """Return the valid records nearest to a place: NAMED neighbours, then NAMED_TOO stored records.

        The caller's is left out, unless it is newer than what the caller presents: then its identity runs elsewhere too.
        """

        def is_wanted(held: Held) -> bool:
            return self.record_store.is_in_force(held) and (held.peer != caller.peer or held.record.supersedes(caller.record))

        named = {held.peer: held for held in nearest(filter(is_wanted, self.neighbours.all()), place, NAMED)}
        stored = (held for held in self.holdings.all() if held.peer not in named and is_wanted(held))
        return [*named.values(), *nearest(stored, place, NAMED_TOO)]

    async def _admit(self, info: Any, context: P2PContext, num_bytes: int) -> tuple[Held | None, str]:
        """Charge a reply to the caller; return its record, None if it is no member's, and the caller's remote multiaddr."""
        caller = PeerId(context.remote_id.to_bytes())  # raises BadMessage for keys other than Ed25519
        end = await self._end_of(caller)
        self._charge(caller, end, num_bytes)
        return self._check_presented(caller, self.record_store.keep_latest(info.node_id), end), end

    def _charge(self, caller: PeerId, end: str, num_bytes: int) -> None:
        """Charge bytes to a caller at multiaddr `end`. A caller on the local network counts as its own network. Raises Overload."""
        network = str(caller) if end and route(end) == "local" else network_of(end)
        if not self._budgets.take(num_bytes, caller, network):
            raise Overload("rate limit of this peer, its network or all peers together exceeded")

    async def _end_of(self, peer: PeerId) -> str:
        """Return the remote multiaddr of the connection to a peer; empty if unknown."""
        if self.clock() - self._ends_at_s >= (ENDS_S if peer in self._ends else CONNECTIONS_S):
            self._ends_at_s, self._ends = self.clock(), {}
            with suppress(Unreachable):
                self._ends = await self.dialer.connected()
        return self._ends.get(peer, "")

    def _node_info(self, known: Collection[bytes] = ()) -> Any:
        """Return our own record in hivemind's form, shortened to its gist if that is in `known`."""
        own_record = self.own_record()
        return dht_pb2.NodeInfo(node_id=gist_if_known(own_record, known) if own_record is not None else b"")

    async def call_ping(self, peer: PeerId, addresses: Sequence[str] = ()) -> Held | None:
        """Ping a peer and return its record; None if it does not reply, or presents no member's record."""
        response = await self._call(peer, addresses, "rpc_ping", dht_pb2.PingRequest(peer=self._node_info()), dht_pb2.PingResponse)
        return (
            None
            if response is None
            else self._check_presented(peer, self.record_store.keep_latest(response.peer.node_id), await self._end_of(peer))
        )

    async def call_find(self, held: Held, place: int) -> list[Held] | None:
        """Return the records near a place that a member knows; None if it does not reply."""
        known = {
            one.record.gist: one for one in (held, *self.record_store.known_to_last(place, KNOWN - 1)) if self.record_store.is_lasting(one)
        }
        request = dht_pb2.FindRequest(keys=[place.to_bytes(KEY_BYTES, "big"), *known], peer=self._node_info())
        response = await self._call(held.peer, held.record.addresses, "rpc_find", request, dht_pb2.FindResponse)
        if response is None or len(response.results) != 1:
            return None
        shown = response.peer.node_id
        self._check_presented(held.peer, known.get(shown) or self.record_store.keep_latest(shown), await self._end_of(held.peer))
        named = []
        for data in islice(split_reply(response.results[0].value), NAMED + NAMED_TOO):
            if (one := known.get(data) or self.record_store.keep_latest(data)) is not None:
                named.append(one)
            await asyncio.sleep(0)  # yields to other tasks: checking a signature takes 0.3 ms
        return [one for one in named if can_be_called(one.record)]

    async def call_store(self, held: Held, own: bytes) -> bool:
        """Store our own record at a member; return whether the member confirms it."""
        request = dht_pb2.StoreRequest(peer=dht_pb2.NodeInfo(node_id=own))
        response = await self._call(held.peer, held.record.addresses, "rpc_store", request, dht_pb2.StoreResponse)
        return response is not None and list(response.store_ok) == [True]

    def is_calling(self, peer: PeerId) -> bool:
        """Return whether a call of ours to a peer is in flight."""
        return peer in self._calling

    def _check_presented(self, peer: PeerId, held: Held | None, end: str) -> Held | None:
        """Return the record that a peer presents, None if it is not its own. A peer that can be called becomes a neighbour."""
        if held is None or held.peer != peer:
            return None
        if can_be_called(held.record, end):
            self.neighbours.note_contact(held, network_of(end))
        return held

    async def _call(self, peer: PeerId, addresses: Sequence[str], method: str, request: Any, reply: type[Any]) -> Any:
        """Call a peer and return its reply, None on error or timeout. A peer that does not reply is removed from the routing table."""
        self._calling[peer] += 1
        try:
            async with asyncio.timeout(CALL_S):
                if addresses:
                    await self.dialer.connect(peer, addresses)
                return await self.p2p.call_protobuf_handler(PeerID(peer.raw), f"{SERVICE}.{method}", request, reply)
        except P2PHandlerError as error:  # the peer replied with an error
            log.debug("%s at %s: %r", method, peer, error)
        except (TransportError, P2PDaemonError, OSError, DecodeError) as error:  # TimeoutError is an OSError
            log.debug("%s at %s: %r", method, peer, error)
            self.neighbours.lost(peer)
        finally:
            self._calling -= Counter([peer])
        return None


def can_be_called(record: MemberRecord, end: str = "") -> bool:
    """Return whether a member has a public address, or a local one if `end`, its connection's remote multiaddr, is local or unknown."""
    direct = [address for address in record.addresses if route(address) != "relayed"]
    return any(route(address) == "direct" for address in direct) or (bool(direct) and (not end or route(end) == "local"))
