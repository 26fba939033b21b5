"""The directory over libp2p: member records of a run in hivemind's DHT, its doors locked.

The nodes, routing table and search are hivemind's, but every RPC is ours. What a stranger sends is bounded before it is looked at,
values are member records and nothing else, and a node's place is the hash of its peer id, not of its choice. Records are not copied
from node to node: their owners announce them every minute. What stays open: whoever holds many identities can still crowd around a
key, hence shards (`records.py`) and peer exchange. Only hints come out (`transport.Directory`).

A peer's clock matters: records are in force between absolute times, so one that runs more than 30 s ahead has its records refused,
and one minutes ahead sees others' as expired. Such a peer still trains and meets, through bootstraps and acquaintances; hivemind's
own answer, not to start at all when clocks differ by 3 s, is not taken over.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import Any, Self

from google.protobuf.message import DecodeError

from protocol.errors import BadMessage, TransportError, Unreachable
from protocol.identity import PeerId
from protocol.libp2p.hivemind_imports import (
    DHTID,
    P2P,
    Blacklist,
    Client,
    DHTNode,
    DHTProtocol,
    Multiaddr,
    P2PContext,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    RoutingTable,
    dht_pb2,
)
from protocol.libp2p.p2pd import MESSAGE_BYTES
from protocol.libp2p.record_store import RECORDS_PER_KEY, RecordShelf, split_answer
from protocol.messages.records import MemberRecord

log = logging.getLogger(__name__)

KEYS_PER_FIND = 64
KEY_BYTES = DHTID.HASH_NBYTES
NEIGHBOURS_PER_KEY = 20
ANSWER_BYTES = MESSAGE_BYTES // 2
CALLS_PER_S = 20.0
BURST_CALLS = 40.0
CALLERS = 1024
CALL_S = 3.0
SEARCH_WORKERS = 16
BUCKET_DEPTH = 5  # hivemind's default

search_ends_s: ContextVar[float] = ContextVar("search_ends_s")
"""Loop time at which the search that this task belongs to is over: later calls fail at once, so that hivemind's search ends by
itself and nothing has to be cancelled inside it."""


class Overload(Exception):
    """A caller asks more often than it may."""


class CallRate:
    """A bucket of calls per caller, for the last CALLERS callers."""

    def __init__(self) -> None:
        self._left: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # caller: calls left, at what time

    def take(self, caller: bytes) -> None:
        """Raise Overload when this caller has no calls left."""
        now = time.monotonic()
        left, at = self._left.pop(caller, (BURST_CALLS, now))
        left = min(BURST_CALLS, left + (now - at) * CALLS_PER_S)
        self._left[caller] = (max(left - 1.0, 0.0), now)
        if len(self._left) > CALLERS:
            self._left.popitem(last=False)
        if left < 1.0:
            raise Overload(f"more than {CALLS_PER_S:g} calls a second")


def place_of(peer: PeerID) -> DHTID:
    """Return the place of a peer in the DHT: nobody chooses it, for it is the hash of its key."""
    return DHTID.generate(source=peer.to_bytes())


class AttachedP2P(P2P):  # type: ignore[misc]
    """hivemind's client of our p2pd, whose calls fail once it is closed instead of waiting for ever."""

    @classmethod
    async def attach(cls, socket: Path) -> Self:
        """Open the persistent connection over which DHT messages go."""
        self: Self = cls()
        self._alive = True
        self._daemon_listen_maddr = Multiaddr(f"/unix{socket}")
        self._client_listen_maddr = Multiaddr(f"/unix{socket}.unused")  # streams go through tunnel.py
        self._client = await Client.create(self._daemon_listen_maddr, self._client_listen_maddr, persistent_conn_max_msg_size=MESSAGE_BYTES)
        self._client.control._pending_calls = _WaitingCalls()
        await self._ping_daemon()
        return self

    @property
    def is_broken(self) -> bool:
        """Whether nothing comes over the connection any more."""
        return bool(self._client.control._read_task.done())

    def tidy(self) -> None:
        """Forget inbound calls that their callers cancelled, which hivemind keeps for ever; call now and then."""
        tasks = self._client.control._handler_tasks
        for call in [call for call, task in tasks.items() if task.done()]:
            del tasks[call]

    async def close(self) -> None:
        """End every call under way, here and in hivemind's own tasks, and the connection."""
        control = self._client.control
        control.call_unary_handler = _closed
        for waiting in list(control._pending_calls.values()):
            if not waiting.done():
                waiting.set_exception(P2PDaemonError("closed"))
        tasks = [control._read_task, control._write_task, *control._handler_tasks.values()]
        self._terminate()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _WaitingCalls(dict[Any, Any]):
    """Calls under way. hivemind's reader dies of an answer to a call that has just been cancelled; here such a call is not found."""

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()


async def _closed(*_: object) -> bytes:
    raise P2PDaemonError("closed")


class RecordProtocol(DHTProtocol):  # type: ignore[misc]
    """The RPCs of one DHT node that holds member records."""

    _rpc_handlers = None  # not to share the parent's
    _stub_type = None
    _doubts: set[asyncio.Task[Any]]  # is the least recently seen node of a full bucket still there?

    @classmethod
    async def open(cls, p2p: AttachedP2P, shelf: RecordShelf) -> Self:
        """Serve `shelf`."""
        self: Self = cls(_initialized_with_create=True)
        self.p2p, self.shelf, self.client_mode, self.authorizer = p2p, shelf, False, None
        self.node_id = place_of(p2p.peer_id)
        self.node_info = dht_pb2.NodeInfo(node_id=self.node_id.to_bytes())
        self.bucket_size = NEIGHBOURS_PER_KEY
        self.routing_table = RoutingTable(self.node_id, NEIGHBOURS_PER_KEY, BUCKET_DEPTH)
        self._rate = CallRate()
        self._doubts = set()
        await self.add_p2p_handlers(p2p)
        return self

    # ---- what others ask ----

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Answer, and remember the caller."""
        self._meet_caller(request.peer, context.remote_id)
        return dht_pb2.PingResponse(peer=self.node_info, dht_time=time.time())

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Hold the caller's record, if it is one."""
        self._meet_caller(request.peer, context.remote_id)
        if len(request.keys) != 1 or len(request.values) != 1:
            raise BadMessage("one record at a time")
        return dht_pb2.StoreResponse(store_ok=[self.shelf.offer(request.keys[0], request.values[0])], peer=self.node_info)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Return what is held under each key, and whom to ask next."""
        self._meet_caller(request.peer, context.remote_id)
        if not 1 <= len(request.keys) <= KEYS_PER_FIND or any(len(key) != KEY_BYTES for key in request.keys):
            raise BadMessage(f"{len(request.keys)} keys at once, or keys of a wrong length")
        caller = place_of(context.remote_id)
        max_bytes = ANSWER_BYTES // len(request.keys)
        return dht_pb2.FindResponse(results=[self._found(key, caller, max_bytes) for key in request.keys], peer=self.node_info)

    def _found(self, key: bytes, caller: DHTID, max_bytes: int) -> dht_pb2.FindResult:
        value = self.shelf.answer(key, max_bytes)
        result = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY if value else dht_pb2.NOT_FOUND, value=value)
        for _, peer in self.routing_table.get_nearest_neighbors(DHTID.from_bytes(key), k=NEIGHBOURS_PER_KEY, exclude=caller):
            result.nearest_peer_ids.append(peer.to_bytes())
        return result

    def _meet_caller(self, info: Any, caller: PeerID) -> None:
        self._rate.take(caller.to_bytes())
        PeerId(caller.to_bytes())  # only Ed25519 peers are ours
        if info.node_id:  # empty: the caller serves nobody
            self._met(caller)

    def _met(self, peer: PeerID) -> None:
        least_recent = self.routing_table.add_or_update_node(place_of(peer), peer)
        if least_recent is not None and not self._doubts:
            self._doubts.add(task := asyncio.create_task(self.call_ping(least_recent[1])))
            task.add_done_callback(self._doubts.discard)

    # ---- what we ask ----

    async def call_ping(self, peer: PeerID, **_: object) -> DHTID | None:
        """Return the peer's place, None when it does not answer."""
        response = await self._call(peer, "rpc_ping", dht_pb2.PingRequest(peer=self.node_info))
        return None if response is None else place_of(peer)

    async def call_find(self, peer: PeerID, keys: Any) -> dict[DHTID, tuple[None, dict[DHTID, PeerID]]] | None:
        """Ask for records, which go on the shelf, and for neighbours, which are returned. None: no answer."""
        keys = list(keys)
        request = dht_pb2.FindRequest(keys=[key.to_bytes() for key in keys], peer=self.node_info)
        response = await self._call(peer, "rpc_find", request)
        if response is None or len(response.results) != len(keys):
            return None
        for result in response.results:
            await self._notice(result.value)
        return {key: (None, _neighbours(result)) for key, result in zip(keys, response.results, strict=True)}

    async def call_store(self, peer: PeerID, key: bytes, data: bytes) -> bool:
        """Return whether the peer says that it holds the record now."""
        request = dht_pb2.StoreRequest(keys=[key], values=[data], peer=self.node_info)
        response = await self._call(peer, "rpc_store", request)
        return response is not None and list(response.store_ok) == [True]

    async def _notice(self, answer: bytes) -> None:
        for number, data in enumerate(islice(split_answer(answer), RECORDS_PER_KEY)):
            self.shelf.notice(data)
            if number % 32 == 31:  # a signature takes 0.1 ms to check
                await asyncio.sleep(0)

    async def _call(self, peer: PeerID, method: str, request: Any) -> Any:
        """Return the peer's answer, None when there is none in time; the routing table learns which."""
        timeout_s = min(CALL_S, search_ends_s.get(math.inf) - asyncio.get_running_loop().time())
        if timeout_s <= 0:
            return None
        try:
            response = await getattr(self.get_stub(peer), method)(request, timeout=timeout_s)
        except (P2PDaemonError, P2PHandlerError, OSError, DecodeError) as error:  # OSError: the time-out too
            log.debug("%s at %s: %r", method, peer, error)
            self._lost(peer)
            return None
        if response.peer.node_id:
            self._met(peer)
        return response

    def _lost(self, peer: PeerID) -> None:
        if (place := place_of(peer)) in self.routing_table:
            del self.routing_table[place]


def _neighbours(result: Any) -> dict[DHTID, PeerID]:
    found = {}
    for raw in result.nearest_peer_ids[:NEIGHBOURS_PER_KEY]:
        with suppress(BadMessage):
            peer = PeerID(PeerId(raw).raw)
            found[place_of(peer)] = peer
    return found


class RecordNode(DHTNode):  # type: ignore[misc]
    """hivemind's search over our RPCs. Its own storage, caches and values are not used."""

    @classmethod
    async def open(cls, p2p: AttachedP2P, shelf: RecordShelf) -> Self:
        """Make a node that knows nobody yet."""
        self: Self = cls(_initialized_with_create=True)
        self.p2p, self.peer_id = p2p, p2p.peer_id
        self.protocol = await RecordProtocol.open(p2p, shelf)
        self.node_id = self.protocol.node_id
        self.num_workers = SEARCH_WORKERS
        self.blacklist = Blacklist(base_time=5.0, backoff_rate=2.0)
        return self

    async def nearest(self, keys: Sequence[bytes], num_nodes: int, within_s: float) -> dict[bytes, list[PeerID]]:
        """Walk towards each key, noticing records on the way; return the nearest nodes but ourselves. Ends within `within_s`."""
        search_ends_s.set(asyncio.get_running_loop().time() + within_s)
        queries = [DHTID.from_bytes(key) for key in keys]
        found = await self.find_nearest_nodes(queries, k_nearest=num_nodes, exclude_self=True)
        return {query.to_bytes(): list(nodes.values()) for query, nodes in found.items()}


NUM_HOLDERS = 10
SEARCH_S = 6.0
CLOSE_S = 2.0
NEIGHBOURS_ASKED = 20  # for the nodes around our own place


class DhtDirectory:
    """One peer's part of the directory, over one p2pd. Every call ends in time by itself; all are cancel-safe."""

    def __init__(self, node: RecordNode) -> None:
        self._node = node
        self._p2p: AttachedP2P = node.p2p
        self._shelf: RecordShelf = node.protocol.shelf
        self._searches: set[asyncio.Task[object]] = set()

    async def close(self) -> None:
        """End what is under way, and the connection it goes over. Others notice by themselves."""
        await self._p2p.close()
        if self._searches:  # they end at once: every call of theirs fails now
            await asyncio.wait(self._searches, timeout=CLOSE_S)

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
        if self._p2p.is_broken:
            raise Unreachable("the connection to p2pd has ended")

    async def _nearest(self, keys: Iterable[bytes], num_nodes: int) -> dict[bytes, list[PeerID]]:
        """Search in a task of its own: it ends by itself in SEARCH_S, while hivemind's search leaks tasks when it is cancelled."""
        task = asyncio.create_task(self._node.nearest(list(keys), num_nodes, SEARCH_S), name="directory search")
        self._searches.add(task)
        task.add_done_callback(self._searches.discard)
        return await asyncio.shield(task)
