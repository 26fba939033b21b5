"""The DHT's own RPCs, asked directly: what a stranger may send, how often, and what it gets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from protocol import limits
from protocol.errors import BadMessage
from protocol.libp2p import kademlia
from protocol.libp2p.hivemind_imports import P2PDaemonError, PeerID, dht_pb2
from protocol.libp2p.kademlia import CallRate, Overload, RecordProtocol, place_of
from protocol.libp2p.p2pd import MESSAGE_BYTES
from protocol.libp2p.record_store import RecordShelf, split_answer
from tests.protocol.libp2p.test_record_store import record
from tests.protocol.peers import seeded
from tests.protocol.samples import NOW_S, RUN_ID

ME, CALLER = (PeerID(seeded(number).peer_id.raw) for number in (1, 2))
CONTEXT: Any = SimpleNamespace(remote_id=CALLER)
SERVES = dht_pb2.NodeInfo(node_id=b"any place it likes to claim")


def node() -> RecordProtocol:
    """Make a node without a network."""

    async def add_protobuf_handler(*_: object, **__: object) -> None:
        """Serve nobody."""

    p2p: Any = SimpleNamespace(peer_id=ME, add_protobuf_handler=add_protobuf_handler)
    return asyncio.run(RecordProtocol.open(p2p, RecordShelf(RUN_ID, now=lambda: NOW_S)))


def store(to: RecordProtocol, keys: list[bytes], values: list[bytes]) -> list[bool]:
    response = asyncio.run(to.rpc_store(dht_pb2.StoreRequest(keys=keys, values=values), CONTEXT))
    return list(response.store_ok)


def test_a_record_is_stored_and_found() -> None:
    one, author = node(), seeded(5)
    key, data = one.shelf.own_key(author.peer_id), record(author).to_bytes()
    assert store(one, [key], [data]) == [True]
    response = asyncio.run(one.rpc_find(dht_pb2.FindRequest(keys=[key, bytes(20)]), CONTEXT))
    assert [list(split_answer(result.value)) for result in response.results] == [[data], []]


def test_what_is_no_record_is_not_stored() -> None:
    one, author = node(), seeded(5)
    key = one.shelf.own_key(author.peer_id)
    assert store(one, [key], [b"junk"]) == [False]
    assert store(one, [bytes(20)], [record(author).to_bytes()]) == [False]
    with pytest.raises(BadMessage):
        store(one, [key] * 2, [record(author).to_bytes()] * 2)
    with pytest.raises(BadMessage):
        store(one, [], [])


def test_a_find_asks_for_a_bounded_number_of_true_keys() -> None:
    for keys in ([], [bytes(20)] * (kademlia.KEYS_PER_FIND + 1), [b""], [bytes(20), bytes(200_000)]):
        with pytest.raises(BadMessage):
            asyncio.run(node().rpc_find(dht_pb2.FindRequest(keys=keys), CONTEXT))


def test_the_longest_answer_fits_a_message() -> None:
    one = node()
    authors = [seeded(number) for number in range(400)]
    for author in authors:
        one.shelf.offer(one.shelf.own_key(author.peer_id), record(author).to_bytes())
        context: Any = SimpleNamespace(remote_id=PeerID(author.peer_id.raw))
        asyncio.run(one.rpc_ping(dht_pb2.PingRequest(peer=SERVES), context))
    keys = list(one.shelf.key_ids())
    request = dht_pb2.FindRequest(keys=keys * (kademlia.KEYS_PER_FIND // len(keys)))
    response = asyncio.run(one.rpc_find(request, CONTEXT))
    assert kademlia.ANSWER_BYTES / 2 < response.ByteSize() < MESSAGE_BYTES - limits.KIB


def test_nobody_chooses_its_place() -> None:
    one = node()
    asyncio.run(one.rpc_ping(dht_pb2.PingRequest(peer=SERVES), CONTEXT))
    assert one.routing_table.get(peer_id=CALLER) == place_of(CALLER)
    assert one.node_id == place_of(ME)


def test_a_client_is_answered_but_not_remembered() -> None:
    one = node()
    asyncio.run(one.rpc_ping(dht_pb2.PingRequest(), CONTEXT))
    assert CALLER not in one.routing_table


def test_other_kinds_of_key_are_not_served() -> None:
    context: Any = SimpleNamespace(remote_id=PeerID(b"\x12\x20" + bytes(32)))
    with pytest.raises(BadMessage):
        asyncio.run(node().rpc_ping(dht_pb2.PingRequest(peer=SERVES), context))


def answered(response: object) -> RecordProtocol:
    """Make a node that gets this answer (None: none at all) whomever it asks."""

    async def answer(request: object, **options: float) -> object:
        if response is None:
            raise P2PDaemonError("gone")
        return response

    one = node()
    one.get_stub = lambda peer: SimpleNamespace(rpc_find=answer)
    return one


def test_neighbours_that_are_no_peers_are_passed_over() -> None:
    good = seeded(7).peer_id.raw
    result = dht_pb2.FindResult(nearest_peer_ids=[b"", b"x" * 100_000, good], nearest_node_ids=[bytes(20)] * 3)
    one = answered(dht_pb2.FindResponse(results=[result]))
    key = place_of(ME)
    found = asyncio.run(one.call_find(CALLER, [key]))
    assert found == {key: (None, {place_of(PeerID(good)): PeerID(good)})}


def test_records_of_an_answer_go_on_the_shelf_and_junk_does_not() -> None:
    data = record(seeded(7)).to_bytes()
    value = len(data).to_bytes(2, "little") + data + b"\x04\x00junk" + b"\xff\xff"
    one = answered(dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=value)]))
    asyncio.run(one.call_find(CALLER, [place_of(ME)]))
    assert [seen.to_bytes() for seen in one.shelf.records()] == [data]


@pytest.mark.parametrize("response", [None, dht_pb2.FindResponse(), dht_pb2.FindResponse(results=[dht_pb2.FindResult()] * 2)])
def test_an_answer_to_another_question_is_none(response: object) -> None:
    assert asyncio.run(answered(response).call_find(CALLER, [place_of(ME)])) is None


def test_a_caller_has_so_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(kademlia.time, "monotonic", lambda: now[0])
    rate = CallRate()
    for _ in range(int(kademlia.BURST_CALLS)):
        rate.take(b"a")
    with pytest.raises(Overload):
        rate.take(b"a")
    rate.take(b"b")
    now[0] += 1.0
    for _ in range(int(kademlia.CALLS_PER_S)):
        rate.take(b"a")
    with pytest.raises(Overload):
        rate.take(b"a")


def test_callers_are_forgotten_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kademlia, "CALLERS", 10)
    monkeypatch.setattr(kademlia.time, "monotonic", lambda: 0.0)
    rate = CallRate()
    for _ in range(int(kademlia.BURST_CALLS)):
        rate.take(b"a")
    for number in range(9):
        rate.take(bytes([number]))
    with pytest.raises(Overload):
        rate.take(b"a")
    for number in range(10):
        rate.take(bytes([number]))
    rate.take(b"a")
