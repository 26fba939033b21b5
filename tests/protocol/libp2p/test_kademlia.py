"""The directory's RPCs, called directly: which requests are accepted, how often, and what they return."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.hivemind_imports import P2PDaemonError, P2PHandlerError, PeerID, dht_pb2
from gossamer.protocol.libp2p.kademlia import KEY_BYTES, KNOWN, NAMED, NAMED_TOO, PER_PEER, Overload, RecordProtocol, can_be_called
from gossamer.protocol.libp2p.neighbours import Held, place_of
from gossamer.protocol.libp2p.record_store import RecordStore, join_records, split_reply
from gossamer.protocol.messages.records import MemberRecord
from tests.protocol.libp2p.test_record_store import record
from tests.protocol.peers import seeded
from tests.protocol.samples import NOW_S, RUN_ID

ME, CALLER, STRANGER = seeded(1), seeded(2), seeded(3)
HOME = ("/ip4/203.0.113.5/tcp/4001",)


NEARBY = [seeded(number) for number in range(100, 140)]


class Lines:
    """All peers are connected, from the multiaddrs in `ends`."""

    def __init__(self) -> None:
        self.ends = {CALLER.peer_id: HOME[0], STRANGER.peer_id: HOME[0]} | {peer.peer_id: "/ip4/127.0.0.1/tcp/1" for peer in NEARBY}

    async def connect(self, partner: PeerId, addresses: object) -> None:
        """Succeed for every peer."""

    async def connected(self) -> dict[PeerId, str]:
        return self.ends


def from_peer(identity: Identity) -> Any:
    return SimpleNamespace(remote_id=PeerID(identity.peer_id.raw))


def own_record(identity: Identity, addresses: tuple[str, ...] = HOME) -> Any:
    return dht_pb2.NodeInfo(node_id=record(identity, addresses=addresses).to_bytes())


def held_of(made: MemberRecord) -> Held:
    return Held(made, made.to_bytes())


def find(place: int, peer: Any, *known: bytes) -> Any:
    return dht_pb2.FindRequest(keys=[place.to_bytes(KEY_BYTES, "big"), *known], peer=peer)


def named_in(response: Any) -> list[MemberRecord]:
    return [MemberRecord.from_bytes(data) for data in split_reply(response.results[0].value)]


@pytest.fixture
@asynccontextmanager
async def one() -> AsyncIterator[RecordProtocol]:
    """Open a node without a network; STRANGER is no member."""

    async def add_protobuf_handler(*_: object, **__: object) -> None:
        """Do nothing."""

    p2p: Any = SimpleNamespace(peer_id=PeerID(ME.peer_id.raw), add_protobuf_handler=add_protobuf_handler)
    record_store = RecordStore(RUN_ID, lambda made: made.peer_id != STRANGER.peer_id, lambda: NOW_S)
    made = RecordProtocol(p2p, record_store, Lines(), lambda: record(ME))
    await made.open()
    yield made


async def test_a_stored_record_is_found_by_another_member(one: RecordProtocol) -> None:
    hidden = "/ip4/198.51.100.7/tcp/4001/p2p/12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X/p2p-circuit"
    author = seeded(5)
    info = own_record(author, (hidden,))
    response = await one.rpc_store(dht_pb2.StoreRequest(peer=info), from_peer(author))
    assert list(response.store_ok) == [True]
    assert len(one.neighbours) == 0, "an unreachable peer must not become a neighbour"
    answer = await one.rpc_find(find(place_of(author.peer_id), own_record(CALLER)), from_peer(CALLER))
    assert [seen.to_bytes() for seen in named_in(answer)] == [info.node_id]


async def test_a_caller_gets_its_own_record_only_if_it_is_newer_than_what_it_presents(one: RecordProtocol) -> None:
    place, older = place_of(CALLER.peer_id), own_record(CALLER)
    newer = replace(record(CALLER, addresses=HOME), sequence=1 << 40, signature=b"").signed(CALLER)
    await one.rpc_store(dht_pb2.StoreRequest(peer=older), from_peer(CALLER))
    assert named_in(await one.rpc_find(find(place, older), from_peer(CALLER))) == []
    await one.rpc_store(dht_pb2.StoreRequest(peer=dht_pb2.NodeInfo(node_id=newer.to_bytes())), from_peer(CALLER))
    assert named_in(await one.rpc_find(find(place, older), from_peer(CALLER))) == [newer]


async def test_a_peer_that_is_no_member_gets_only_a_pong(one: RecordProtocol) -> None:
    for info in (dht_pb2.NodeInfo(), own_record(STRANGER), own_record(CALLER), dht_pb2.NodeInfo(node_id=b"junk")):
        pong = await one.rpc_ping(dht_pb2.PingRequest(peer=info), from_peer(STRANGER))
        assert not pong.peer.node_id
        assert pong.ByteSize() < 20
        assert list((await one.rpc_store(dht_pb2.StoreRequest(peer=info), from_peer(STRANGER))).store_ok) == [False]
        with pytest.raises(BadMessage, match="only members"):
            await one.rpc_find(find(0, info), from_peer(STRANGER))
    assert len(one.neighbours) == 0
    assert one.holdings.all() == []


async def test_a_member_gets_our_record_and_becomes_a_neighbour(one: RecordProtocol) -> None:
    pong = await one.rpc_ping(dht_pb2.PingRequest(peer=own_record(CALLER)), from_peer(CALLER))
    assert MemberRecord.from_bytes(pong.peer.node_id).peer_id == ME.peer_id
    assert [held.peer for held in one.neighbours.all()] == [CALLER.peer_id]


async def test_a_lookup_is_for_one_place(one: RecordProtocol) -> None:
    for keys in ([], [b""], [bytes(200_000)], [bytes(KEY_BYTES)] * (KNOWN + 2)):
        with pytest.raises(BadMessage):
            await one.rpc_find(dht_pb2.FindRequest(keys=keys, peer=own_record(CALLER)), from_peer(CALLER))


async def test_records_that_the_caller_knows_are_sent_as_gists(one: RecordProtocol) -> None:
    known, moved, new = seeded(5), seeded(6), seeded(7)
    for author in (known, moved, new):
        one.neighbours.note_contact(held_of(record(author, 2, addresses=HOME)), "")
    has = [record(known, 1, addresses=HOME).gist, record(moved, 1, addresses=("/ip4/198.51.100.7/tcp/4001",)).gist, record(ME).gist]
    answer = await one.rpc_find(find(7, own_record(CALLER), *has), from_peer(CALLER))
    listed = set(split_reply(answer.results[0].value))
    assert listed == {record(known, 2, addresses=HOME).gist, *(record(who, 2, addresses=HOME).to_bytes() for who in (moved, new))}
    assert answer.peer.node_id == record(ME).gist


async def test_a_reply_holds_a_bounded_number_of_the_nearest_records(one: RecordProtocol) -> None:
    for number in range(100, 400):
        held = one.record_store.keep_latest(record(seeded(number), addresses=HOME).to_bytes())
        assert held is not None
        one.holdings.put(held, "", NOW_S)
    response = await one.rpc_find(find(7, own_record(CALLER)), from_peer(CALLER))
    places = [place_of(seen.peer_id) ^ 7 for seen in named_in(response)]
    assert places == sorted(place_of(seeded(number).peer_id) ^ 7 for number in range(100, 400))[:NAMED_TOO]
    assert response.ByteSize() < 2 * NAMED * limits.RECORD_BYTES


async def test_other_types_of_key_are_not_served(one: RecordProtocol) -> None:
    context: Any = SimpleNamespace(remote_id=PeerID(b"\x12\x20" + bytes(32)))
    with pytest.raises(BadMessage):
        await one.rpc_ping(dht_pb2.PingRequest(), context)


async def test_a_flood_exhausts_only_the_callers_own_rate_limit(one: RecordProtocol) -> None:
    for number in range(100, 120):
        one.record_store.keep_latest(record(seeded(number), addresses=HOME).to_bytes())
        one.neighbours.note_contact(held_of(record(seeded(number), addresses=HOME)), str(number))
    sent, refused = 0, 0
    for _ in range(1000):
        try:
            sent += (await one.rpc_find(find(7, own_record(CALLER)), from_peer(CALLER))).ByteSize()
        except Overload:
            refused += 1
    assert sent <= PER_PEER.capacity + 5000
    assert refused > 900
    other = seeded(9)
    assert await one.rpc_find(find(7, own_record(other)), from_peer(other))


async def test_peers_on_the_local_network_do_not_share_a_rate_limit(one: RecordProtocol) -> None:
    for caller in NEARBY:
        for _ in range(8):
            await one.rpc_find(find(7, own_record(caller)), from_peer(caller))


def answered(one: RecordProtocol, response: object) -> list[Any]:
    """Make every call of a node return this reply or raise it; return the list of its requests."""
    requests: list[Any] = []

    async def answer(peer: PeerID, name: str, request: object, reply: type[Any]) -> object:
        requests.append(request)
        if isinstance(response, Exception):
            raise response
        return response

    one.p2p.call_protobuf_handler = answer
    return requests


def whom() -> Held:
    return held_of(record(CALLER, addresses=HOME))


async def test_valid_records_of_a_reply_are_kept_and_invalid_ones_are_not(one: RecordProtocol) -> None:
    good, foreign = record(seeded(7), addresses=HOME), record(STRANGER, addresses=HOME)
    value = join_records([held_of(made) for made in (good, foreign)]) + b"\x04\x00junk" + b"\xff\xff"
    answered(one, dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=value)]))
    assert await one.call_find(whom(), 0) == [held_of(good)]
    assert one.record_store.records() == [good]


async def test_only_longlived_records_are_declared_as_known(one: RecordProtocol) -> None:
    known_to_last, ending, other = (record(seeded(7), 1, 300, HOME), record(seeded(8), 1, 100, HOME), record(seeded(9), 1, 300, HOME))
    for made in (known_to_last, ending):
        assert one.record_store.keep_latest(made.to_bytes())
    value = b"".join(b"\x08\x00" + made.gist for made in (known_to_last, ending, other))
    asked = answered(one, dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=value)]))
    assert await one.call_find(whom(), 0) == [held_of(known_to_last)]
    assert [*asked[0].keys[1:]] == [known_to_last.gist]


async def test_a_reply_with_a_gist_makes_its_peer_a_neighbour(one: RecordProtocol) -> None:
    there = held_of(record(CALLER, 1, 300, HOME))
    answered(one, dht_pb2.FindResponse(results=[dht_pb2.FindResult()], peer=dht_pb2.NodeInfo(node_id=there.record.gist)))
    assert await one.call_find(there, 0) == []
    assert one.neighbours.all() == [there]


async def test_only_as_many_records_are_read_as_a_reply_may_hold(one: RecordProtocol) -> None:
    made = [record(seeded(number), addresses=HOME) for number in range(100, 200)]
    value = join_records([held_of(each) for each in made])
    answered(one, dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=value)]))
    assert len(await one.call_find(whom(), 0) or []) == NAMED + NAMED_TOO


@pytest.mark.parametrize(
    "response", [P2PDaemonError("gone"), dht_pb2.FindResponse(), dht_pb2.FindResponse(results=[dht_pb2.FindResult()] * 2)]
)
async def test_a_reply_to_another_request_is_ignored(response: object, one: RecordProtocol) -> None:
    answered(one, response)
    assert await one.call_find(whom(), 0) is None


async def test_a_silent_neighbour_is_removed_and_a_refusing_one_is_kept(one: RecordProtocol) -> None:
    one.neighbours.note_contact(whom(), "")
    answered(one, P2PHandlerError("too much"))
    assert await one.call_find(whom(), 0) is None
    assert len(one.neighbours) == 1
    answered(one, P2PDaemonError("gone"))
    assert await one.call_find(whom(), 0) is None
    assert len(one.neighbours) == 0


@pytest.mark.parametrize("error", [None, P2PHandlerError("too much"), P2PDaemonError("gone")])
async def test_a_call_is_in_flight_until_its_reply_or_error(error: Exception | None, one: RecordProtocol) -> None:
    seen = []

    async def answer(*_: object) -> object:
        seen.append((one.is_calling(CALLER.peer_id), one.is_calling(STRANGER.peer_id)))
        if error is not None:
            raise error
        return dht_pb2.FindResponse()

    one.p2p.call_protobuf_handler = answer
    await one.call_find(whom(), 0)
    assert seen == [(True, False)] and not one.is_calling(CALLER.peer_id)


async def test_a_peer_that_presents_the_record_of_another_is_ignored(one: RecordProtocol) -> None:
    answered(one, dht_pb2.PingResponse(peer=own_record(seeded(8))))
    assert await one.call_ping(CALLER.peer_id) is None
    assert len(one.neighbours) == 0


@pytest.mark.parametrize(
    ("addresses", "end", "can"),
    [
        (HOME, "", True),
        ((), "", False),
        (("/ip4/192.168.1.5/tcp/1",), "/ip4/192.168.1.5/tcp/9", True),
        (("/ip4/192.168.1.5/tcp/1",), "/ip4/203.0.113.9/tcp/9", False),
        ((f"{HOME[0]}/p2p/{seeded(4).peer_id}/p2p-circuit",), HOME[0], False),
    ],
)
def test_which_members_can_be_called(addresses: tuple[str, ...], end: str, can: bool) -> None:
    public = tuple(address.replace("203.0.113", "8.8.8") for address in addresses)
    made = replace(record(CALLER, addresses=public), signature=b"")
    assert can_be_called(made, end.replace("203.0.113", "8.8.8")) == can
