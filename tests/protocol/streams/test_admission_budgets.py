"""The admission table: how many calls one network and all strangers may make, and which calls are useless."""

from __future__ import annotations

import asyncio

from gossamer.protocol.limits import SLOWEST_BYTES_PER_S
from gossamer.protocol.streams.admission import CALLS_FROM_ONE, CALLS_FROM_STRANGERS, LEAST_RATE_S, MOST_REFUSED
from gossamer.protocol.streams.transport import Purpose
from tests.protocol.peers import seeded
from tests.protocol.streams.tables import A, B, TableUnderTest


async def test_the_calls_of_one_network_are_limited_in_number_and_those_of_others_pass() -> None:
    made = TableUnderTest(has_met={A}.__contains__)

    def call(number: int, observed: str) -> bool:
        connection = made.admit(seeded(number).peer_id, observed)
        if connection is not None:
            made.table.remove(connection)
        return connection is not None

    same_network = [call(number, "/ip4/6.6.0.1/tcp/9") for number in range(1000, 1500)]
    assert sum(same_network) == CALLS_FROM_ONE.capacity
    assert call(2000, "/ip4/8.8.0.1/tcp/9")
    assert made.admit(A, "/ip4/6.6.0.1/tcp/9"), "whom this peer has met has an allowance of its own"
    await asyncio.sleep(CALLS_FROM_ONE.refill_s / CALLS_FROM_ONE.capacity)
    assert call(2001, "/ip4/6.6.0.1/tcp/9")
    assert not call(2002, "/ip4/6.6.0.1/tcp/9")


async def test_the_calls_of_all_strangers_are_limited_and_not_those_of_peers_met() -> None:
    made = TableUnderTest(has_met={A}.__contains__)
    num_admitted = 0
    for number in range(int(2 * CALLS_FROM_STRANGERS.capacity)):
        connection = made.admit(B, f"/ip4/{6 + number // 250}.{number % 250}.0.1/tcp/9")
        if connection is not None:
            num_admitted += 1
            made.table.remove(connection)
    assert num_admitted == CALLS_FROM_STRANGERS.capacity
    assert made.admit(A)


async def test_further_calls_on_one_connection_are_limited_too() -> None:
    made = TableUnderTest()
    connection = made.admitted(A)
    calls = []
    for _ in range(int(2 * CALLS_FROM_ONE.capacity)):
        calls.append(made.table.begin_call(connection, Purpose.FETCH))
        made.table.end_call(connection)
    assert sum(calls) == CALLS_FROM_ONE.capacity


async def test_a_connection_whose_calls_are_refused_again_and_again_is_dropped() -> None:
    """A refusal costs a quarter of a core at 440 a second, and no budget counts it."""
    made = TableUnderTest()
    held = [made.in_call(A), made.in_call(A)]
    other = made.admitted(A)
    for _ in range(MOST_REFUSED):
        assert not made.table.begin_call(other, Purpose.MEET)
    assert not made.dropped_s
    assert not made.table.begin_call(other, Purpose.MEET)
    assert set(made.dropped_s) == {other} and made.table.is_calling(A) and len(held) == 2


async def test_a_call_that_carries_too_little_over_its_life_is_useless() -> None:
    made = TableUnderTest()
    held, other = made.in_call(A), made.in_call(B)
    assert not made.table.is_useless(A)
    await asyncio.sleep(LEAST_RATE_S + 1)
    assert made.table.is_useless(A) and made.table.is_useless(B)
    made.carried_bytes += 10 * SLOWEST_BYTES_PER_S
    assert not made.table.is_useless(A), "it has carried a payload"
    await asyncio.sleep(1000)
    assert made.table.is_useless(A), "once is not enough"
    made.in_call(A, Purpose.FETCH)
    assert not made.table.is_useless(A), "one of its calls has just begun"
    for connection in (held, other):
        made.table.end_call(connection)
