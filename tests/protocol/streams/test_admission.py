"""The admission table: accepted connections, timeouts and replacement. The transport contract tests the effect on callers."""

from __future__ import annotations

import asyncio

import pytest

from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import SLOWEST_BYTES_PER_S
from gossamer.protocol.streams.admission import FIRST_FRAME_S, LEAST_RATE_S, LINGER_MOST_S, LINGER_S, STALLED_BYTES, STALLED_S, StreamCaps
from gossamer.protocol.streams.transport import Purpose
from tests.protocol.peers import seeded
from tests.protocol.streams.tables import A, B, C, D, TableUnderTest


async def test_the_calls_of_one_partner_for_one_purpose_are_limited() -> None:
    made = TableUnderTest(StreamCaps(per_purpose=2))
    first, _ = made.in_call(A), made.in_call(A)
    third = made.admitted(A)
    assert not made.table.begin_call(third, Purpose.MEET)
    assert made.table.begin_call(third, Purpose.FETCH)
    made.in_call(B)
    made.table.end_call(first)
    made.in_call(A)


async def test_the_connections_of_one_partner_are_limited_including_those_that_are_over() -> None:
    made = TableUnderTest(StreamCaps(per_partner=3))
    connections = [made.in_call(A), made.in_call(A), made.in_call(A, Purpose.FETCH)]
    made.table.end_call(connections[0])
    assert made.admit(A) is None
    assert made.admit(B)
    made.table.remove(connections[0])
    assert made.admit(A)


async def test_a_silent_partner_has_fewer_connections() -> None:
    made = TableUnderTest(StreamCaps(silent=2))
    connection, other = made.admitted(A), made.admitted(A)
    assert made.table.begin_call(connection, Purpose.MEET)
    assert made.admit(A) is None
    assert made.table.note_message(connection)
    assert made.admit(A)
    for known in (connection, other):
        made.table.remove(known)
    assert made.admit(A)
    assert made.admit(A) is None, "what it said is forgotten with its connection"


async def test_a_banned_peer_is_rejected_and_replaces_no_visit() -> None:
    banned = {A}
    made = TableUnderTest(StreamCaps(total=1), lambda partner: partner in banned)
    connection = made.admitted(B)
    assert made.admit(A) is None
    assert made.table.begin_call(connection, Purpose.MEET), "it has given way to nobody"
    banned.clear()
    assert made.admit(A)


async def test_a_message_of_a_peer_banned_after_admission_is_not_handled() -> None:
    banned: set[PeerId] = set()
    made = TableUnderTest(StreamCaps(), lambda partner: partner in banned)
    connection = made.admitted(A)
    assert made.table.begin_call(connection, Purpose.FETCH)
    banned.add(A)
    assert not made.table.note_message(connection)


async def test_a_connection_without_a_call_is_replaced_before_one_with_a_call() -> None:
    made = TableUnderTest(StreamCaps(total=3))
    called, over, bare = made.admitted(A), made.in_call(B), made.admitted(C)
    assert made.table.begin_call(called, Purpose.FETCH)
    made.table.end_call(over)
    assert made.admit(D)
    assert list(made.dropped_s) == [bare]


async def test_a_full_table_replaces_the_visit_that_was_silent_or_over_the_longest() -> None:
    made = TableUnderTest(StreamCaps(total=4))
    over_later, active, silent, over_late = made.in_call(A), made.in_call(B), made.admitted(C), made.in_call(A, Purpose.FETCH)
    made.table.end_call(over_later)
    called = made.admitted(D)
    assert list(made.dropped_s) == [silent], "it was silent before the other was over"
    assert made.table.begin_call(called, Purpose.MEET)
    made.in_call(D)
    assert list(made.dropped_s) == [silent, over_later]
    made.table.end_call(over_late)
    assert made.table.note_message(active)


async def test_a_table_full_of_active_calls_rejects_newcomers() -> None:
    made = TableUnderTest(StreamCaps(total=2))
    first, _ = made.in_call(A), made.in_call(B)
    assert made.admit(C) is None
    made.table.remove(first)
    made.table.remove(first)
    made.in_call(C)
    assert made.admit(A) is None
    assert not made.dropped_s


async def test_a_dropped_visit_cannot_start_a_call() -> None:
    made = TableUnderTest(StreamCaps(total=1))
    early, called = made.admitted(A), None
    called = made.admitted(B)
    assert made.table.begin_call(called, Purpose.MEET)
    made.admitted(C)
    assert list(made.dropped_s) == [early, called]
    assert not made.table.begin_call(early, Purpose.MEET)
    assert not made.table.note_message(called)
    for connection in (early, called):
        made.table.end_call(connection)
        made.table.remove(connection)
    assert len(made.dropped_s) == 2


@pytest.mark.parametrize("calls", [False, True], ids=["no call", "a call without a message"])
async def test_a_silent_visit_is_dropped_after_the_timeout(calls: bool) -> None:
    made = TableUnderTest()
    connection = made.admitted(A)
    if calls:
        await asyncio.sleep(FIRST_FRAME_S - 1)
        assert made.table.begin_call(connection, Purpose.MEET)
    began_s = asyncio.get_running_loop().time()
    await asyncio.sleep(FIRST_FRAME_S + 1)
    assert made.dropped_s == {connection: pytest.approx(began_s + FIRST_FRAME_S)}


async def test_a_call_has_no_timeout_and_its_idle_connection_has_one() -> None:
    made = TableUnderTest()
    active, ended = made.in_call(A), made.in_call(B)
    await asyncio.sleep(1000)
    made.table.end_call(active)
    made.table.end_call(ended)
    made.table.remove(ended)
    await asyncio.sleep(LINGER_S + 1)
    assert made.dropped_s == {active: pytest.approx(1000 + LINGER_S)}


async def test_a_connection_whose_call_is_over_stays_while_its_last_bytes_move() -> None:
    made = TableUnderTest()
    over = made.in_call(A)
    made.table.end_call(over)
    for _ in range(4):
        await asyncio.sleep(LINGER_S - 1)
        made.carried_bytes += 1
        assert not made.dropped_s
    await asyncio.sleep(2 * LINGER_S)
    assert list(made.dropped_s) == [over]


async def test_a_connection_whose_call_is_over_is_dropped_after_the_total_timeout() -> None:
    made = TableUnderTest()
    over = made.in_call(A)
    made.table.end_call(over)
    for _ in range(round(2 * LINGER_MOST_S)):
        await asyncio.sleep(1)
        made.carried_bytes += 1
    assert made.dropped_s == {over: pytest.approx(LINGER_MOST_S)}


async def test_a_connection_whose_call_is_over_may_start_another() -> None:
    made = TableUnderTest(StreamCaps(per_purpose=1, total=2))
    connection = made.in_call(A)
    assert not made.table.begin_call(connection, Purpose.FETCH), "one conversation at a time"
    made.table.end_call(connection)
    other = made.in_call(A)
    assert not made.table.begin_call(connection, Purpose.MEET), "too many for this"
    assert made.table.begin_call(connection, Purpose.FETCH)
    made.admitted(B)
    assert list(made.dropped_s) == [connection], "it has said nothing in its new conversation"
    made.table.end_call(other)


async def test_the_timeout_of_a_call_without_a_message_does_not_end_the_next_call() -> None:
    made = TableUnderTest()
    connection = made.admitted(A)
    assert made.table.begin_call(connection, Purpose.MEET)
    made.table.end_call(connection)
    assert made.table.begin_call(connection, Purpose.MEET)
    assert made.table.note_message(connection)
    await asyncio.sleep(2 * FIRST_FRAME_S)
    assert not made.dropped_s


async def test_a_further_call_has_the_timeout_of_a_first_call() -> None:
    made = TableUnderTest()
    connection = made.in_call(A)
    made.table.end_call(connection)
    await asyncio.sleep(10)
    assert made.table.begin_call(connection, Purpose.MEET)
    await asyncio.sleep(FIRST_FRAME_S + 1)
    assert made.dropped_s == {connection: pytest.approx(10 + FIRST_FRAME_S)}


async def test_a_banned_peer_cannot_start_a_call() -> None:
    banned: set[PeerId] = set()
    made = TableUnderTest(StreamCaps(), lambda partner: partner in banned)
    connection = made.in_call(A)
    made.table.end_call(connection)
    banned.add(A)
    assert not made.table.begin_call(connection, Purpose.MEET)


async def test_the_connections_of_one_network_are_limited() -> None:
    made = TableUnderTest(StreamCaps(per_network=4, total=8))
    same_network = [made.in_call(seeded(number).peer_id, observed=f"/ip4/6.6.{number}.1/tcp/9") for number in range(10, 14)]
    assert made.admit(A, "/ip4/6.6.99.1/tcp/9") is None
    assert made.admit(A, "/ip4/6.7.0.1/tcp/9")
    assert not made.dropped_s
    made.table.end_call(same_network[2])
    assert made.admit(B, "/ip4/6.6.99.1/tcp/9"), "of its own network, one whose conversation is over gives way"
    assert list(made.dropped_s) == [same_network[2]]


async def test_peers_on_the_local_network_do_not_share_a_limit() -> None:
    made = TableUnderTest(StreamCaps(per_network=1))
    for number in range(10, 14):
        made.in_call(seeded(number).peer_id, observed=f"/ip4/192.168.1.{number}/tcp/9")


async def test_a_stalled_call_is_replaced_after_ten_seconds_and_an_active_one_is_not() -> None:
    made = TableUnderTest(StreamCaps(total=3))
    same_network = [made.in_call(peer, observed="/ip4/6.6.0.1/tcp/9") for peer in (A, B)]
    made.in_call(C, observed="/ip4/8.8.0.1/tcp/9")
    made.carried_bytes = 5000
    assert made.admit(D) is None
    await asyncio.sleep(STALLED_S - 0.1)
    made.carried_bytes += STALLED_BYTES - 1
    assert made.admit(D) is None
    await asyncio.sleep(0.1)
    made.in_call(D)
    assert [connection in same_network for connection in made.dropped_s] == [True], "one of the network that has the most"
    made.carried_bytes += STALLED_BYTES
    assert made.admit(seeded(9).peer_id) is None


async def test_no_newcomer_is_kept_out_by_calls_that_trickle() -> None:
    """Strangers that fill the table and send 1,100 bytes every 10 s have kept out 120 of 120 newcomers."""

    made = TableUnderTest()
    for number in range(100, 164):
        made.admit(seeded(number).peer_id, f"/ip4/6.{number}.0.1/tcp/9")
    same_network = [
        connection
        for connection in made.table._connections
        if made.table.begin_call(connection, Purpose.MEET) and made.table.note_message(connection)
    ]
    num_admitted = 0
    for number in range(1000, 1120):
        await asyncio.sleep(10)
        made.carried_bytes += 1100
        connection = made.admit(seeded(number).peer_id, f"/ip4/8.{number % 250}.0.1/tcp/9")
        num_admitted += connection is not None
        if connection is not None:
            made.table.remove(connection)
    assert len(same_network) == StreamCaps().strangers
    assert num_admitted >= 115, "all, once the crowd has been there for LEAST_RATE_S"


async def test_a_call_at_the_slowest_legal_rate_is_not_replaced() -> None:
    made = TableUnderTest(StreamCaps(total=2))
    made.in_call(A)
    made.in_call(B)
    for _ in range(600):
        await asyncio.sleep(1)
        made.carried_bytes += SLOWEST_BYTES_PER_S
        assert made.admit(C) is None
    assert not made.dropped_s


async def test_a_call_may_be_slow_before_its_payload() -> None:
    made = TableUnderTest(StreamCaps(total=1))
    made.in_call(A)
    for _ in range(int(LEAST_RATE_S) // 5):
        await asyncio.sleep(5)
        made.carried_bytes += STALLED_BYTES
        assert made.admit(C) is None


async def test_strangers_leave_places_to_those_whom_this_peer_has_met() -> None:
    met = {A, B}
    made = TableUnderTest(StreamCaps(total=4, strangers=2), has_met=met.__contains__)
    made.in_call(C)
    made.in_call(D)
    assert made.admit(seeded(9).peer_id) is None
    made.in_call(A)
    made.in_call(B)
    assert not made.dropped_s


async def test_a_stranger_may_replace_the_idle_connection_of_someone_met_where_strangers_have_places_left() -> None:
    made = TableUnderTest(StreamCaps(total=3, strangers=2), has_met={A, B}.__contains__)
    over = made.in_call(A)
    made.in_call(A)
    made.in_call(B)
    made.table.end_call(over)
    made.in_call(C)
    assert list(made.dropped_s) == [over]


async def test_strangers_of_its_network_do_not_keep_out_someone_met() -> None:
    made = TableUnderTest(StreamCaps(per_network=2), has_met={A}.__contains__)
    for partner in (B, C):
        made.in_call(partner, observed="/ip4/6.6.0.1/tcp/9")
    assert made.admit(D, "/ip4/6.6.0.2/tcp/9") is None
    assert made.admit(A, "/ip4/6.6.0.3/tcp/9")


async def test_the_place_of_a_stranger_that_has_become_a_partner_is_kept() -> None:
    """A lane stays open for hours: its partner was a stranger when it connected."""

    met: set[PeerId] = set()
    made = TableUnderTest(StreamCaps(total=3, strangers=2), has_met=met.__contains__)
    lane = made.in_call(A, Purpose.PASS)
    made.in_call(B)
    await asyncio.sleep(LEAST_RATE_S + STALLED_S)  # both are slow: the run waits
    met.add(A)
    made.in_call(C)
    made.in_call(D)
    assert lane not in made.dropped_s and len(made.dropped_s) == 1, "of the strangers one makes room for another"
    assert made.table.is_calling(A)
