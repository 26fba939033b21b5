"""The admission table: accepted connections, timeouts and replacement. The transport contract tests the effect on callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import SLOWEST_BYTES_PER_S
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.streams.admission import (
    CALLS_FROM_ONE,
    CALLS_FROM_STRANGERS,
    FIRST_FRAME_S,
    LEAST_RATE_S,
    LINGER_MOST_S,
    LINGER_S,
    STALLED_BYTES,
    STALLED_S,
    Admission,
    StreamCaps,
    Visit,
)
from gossamer.protocol.streams.transport import Purpose
from tests.protocol.peers import seeded

A, B, C, D = (seeded(number).peer_id for number in range(1, 5))


class Door:
    """A table, and the time at which each of its visits was dropped."""

    def __init__(
        self,
        caps: StreamCaps | None = None,
        is_banned: Callable[[PeerId], bool] = lambda partner: False,
        has_met: Callable[[PeerId], bool] = lambda partner: False,
    ) -> None:
        self.table = Admission(caps, is_banned, has_met)
        self.dropped_s: dict[Visit, float] = {}
        self.carried_bytes = 0  # in total

    def admit(self, partner: PeerId, observed: str = "") -> Visit | None:
        def drop() -> None:
            assert visit is not None
            self.dropped_s[visit] = asyncio.get_running_loop().time()

        visit = self.table.admit(partner, drop, lambda: self.carried_bytes, observed)
        return visit

    def admitted(self, partner: PeerId, observed: str = "") -> Visit:
        visit = self.admit(partner, observed)
        assert visit is not None
        return visit

    def talking(self, partner: PeerId, purpose: Purpose = Purpose.MEET, observed: str = "") -> Visit:
        visit = self.admitted(partner, observed)
        assert self.table.begin(visit, purpose)
        assert self.table.heard(visit)
        return visit


def play(test: Callable[[], None]) -> None:
    async def main() -> None:
        test()

    virtual_time.run(main())


def test_the_calls_of_one_partner_for_one_purpose_are_limited() -> None:
    def test() -> None:
        door = Door(StreamCaps(per_purpose=2))
        first, _ = door.talking(A), door.talking(A)
        third = door.admitted(A)
        assert not door.table.begin(third, Purpose.MEET)
        assert door.table.begin(third, Purpose.FETCH)
        door.talking(B)
        door.table.over(first)
        door.talking(A)

    play(test)


def test_the_connections_of_one_partner_are_limited_including_those_that_are_over() -> None:
    def test() -> None:
        door = Door(StreamCaps(per_partner=3))
        visits = [door.talking(A), door.talking(A), door.talking(A, Purpose.FETCH)]
        door.table.over(visits[0])
        assert door.admit(A) is None
        assert door.admit(B)
        door.table.end(visits[0])
        assert door.admit(A)

    play(test)


def test_a_silent_partner_has_fewer_connections() -> None:
    def test() -> None:
        door = Door(StreamCaps(silent=2))
        visit, other = door.admitted(A), door.admitted(A)
        assert door.table.begin(visit, Purpose.MEET)
        assert door.admit(A) is None
        assert door.table.heard(visit)
        assert door.admit(A)
        for known in (visit, other):
            door.table.end(known)
        assert door.admit(A)
        assert door.admit(A) is None, "what it said is forgotten with its connection"

    play(test)


def test_a_banned_peer_is_rejected_and_replaces_no_visit() -> None:
    def test() -> None:
        banned = {A}
        door = Door(StreamCaps(total=1), lambda partner: partner in banned)
        visit = door.admitted(B)
        assert door.admit(A) is None
        assert door.table.begin(visit, Purpose.MEET), "it has given way to nobody"
        banned.clear()
        assert door.admit(A)

    play(test)


def test_a_message_of_a_peer_banned_after_admission_is_not_handled() -> None:
    def test() -> None:
        banned: set[PeerId] = set()
        door = Door(StreamCaps(), lambda partner: partner in banned)
        visit = door.admitted(A)
        assert door.table.begin(visit, Purpose.FETCH)
        banned.add(A)
        assert not door.table.heard(visit)

    play(test)


def test_a_connection_without_a_call_is_replaced_before_one_with_a_call() -> None:
    def test() -> None:
        door = Door(StreamCaps(total=3))
        called, over, bare = door.admitted(A), door.talking(B), door.admitted(C)
        assert door.table.begin(called, Purpose.FETCH)
        door.table.over(over)
        assert door.admit(D)
        assert list(door.dropped_s) == [bare]

    play(test)


def test_a_full_table_replaces_the_visit_that_was_silent_or_over_the_longest() -> None:
    def test() -> None:
        door = Door(StreamCaps(total=4))
        over_later, talks, silent, over_late = door.talking(A), door.talking(B), door.admitted(C), door.talking(A, Purpose.FETCH)
        door.table.over(over_later)
        called = door.admitted(D)
        assert list(door.dropped_s) == [silent], "it was silent before the other was over"
        assert door.table.begin(called, Purpose.MEET)
        door.talking(D)
        assert list(door.dropped_s) == [silent, over_later]
        door.table.over(over_late)
        assert door.table.heard(talks)

    play(test)


def test_a_table_full_of_active_calls_rejects_newcomers() -> None:
    def test() -> None:
        door = Door(StreamCaps(total=2))
        first, _ = door.talking(A), door.talking(B)
        assert door.admit(C) is None
        door.table.end(first)
        door.table.end(first)
        door.talking(C)
        assert door.admit(A) is None
        assert not door.dropped_s

    play(test)


def test_a_dropped_visit_cannot_start_a_call() -> None:
    def test() -> None:
        door = Door(StreamCaps(total=1))
        early, called = door.admitted(A), None
        called = door.admitted(B)
        assert door.table.begin(called, Purpose.MEET)
        door.admitted(C)
        assert list(door.dropped_s) == [early, called]
        assert not door.table.begin(early, Purpose.MEET)
        assert not door.table.heard(called)
        for visit in (early, called):
            door.table.over(visit)
            door.table.end(visit)
        assert len(door.dropped_s) == 2

    play(test)


@pytest.mark.parametrize("calls", [False, True], ids=["no call", "a call without a message"])
def test_a_silent_visit_is_dropped_after_the_timeout(calls: bool) -> None:
    async def main() -> None:
        door = Door()
        visit = door.admitted(A)
        if calls:
            await asyncio.sleep(FIRST_FRAME_S - 1)
            assert door.table.begin(visit, Purpose.MEET)
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(FIRST_FRAME_S + 1)
        assert door.dropped_s == {visit: pytest.approx(began_s + FIRST_FRAME_S)}

    virtual_time.run(main())


def test_a_call_has_no_timeout_and_its_idle_connection_has_one() -> None:
    async def main() -> None:
        door = Door()
        talks, ended = door.talking(A), door.talking(B)
        await asyncio.sleep(1000)
        door.table.over(talks)
        door.table.over(ended)
        door.table.end(ended)
        await asyncio.sleep(LINGER_S + 1)
        assert door.dropped_s == {talks: pytest.approx(1000 + LINGER_S)}

    virtual_time.run(main())


def test_a_connection_whose_call_is_over_stays_while_its_last_bytes_move() -> None:
    async def main() -> None:
        door = Door()
        over = door.talking(A)
        door.table.over(over)
        for _ in range(4):
            await asyncio.sleep(LINGER_S - 1)
            door.carried_bytes += 1
            assert not door.dropped_s
        await asyncio.sleep(2 * LINGER_S)
        assert list(door.dropped_s) == [over]

    virtual_time.run(main())


def test_a_connection_whose_call_is_over_is_dropped_after_the_total_timeout() -> None:
    async def main() -> None:
        door = Door()
        over = door.talking(A)
        door.table.over(over)
        for _ in range(round(2 * LINGER_MOST_S)):
            await asyncio.sleep(1)
            door.carried_bytes += 1
        assert door.dropped_s == {over: pytest.approx(LINGER_MOST_S)}

    virtual_time.run(main())


def test_a_connection_whose_call_is_over_may_start_another() -> None:
    def test() -> None:
        door = Door(StreamCaps(per_purpose=1, total=2))
        visit = door.talking(A)
        assert not door.table.begin(visit, Purpose.FETCH), "one conversation at a time"
        door.table.over(visit)
        other = door.talking(A)
        assert not door.table.begin(visit, Purpose.MEET), "too many for this"
        assert door.table.begin(visit, Purpose.FETCH)
        door.admitted(B)
        assert list(door.dropped_s) == [visit], "it has said nothing in its new conversation"
        door.table.over(other)

    play(test)


def test_a_further_call_has_the_timeout_of_a_first_call() -> None:
    async def main() -> None:
        door = Door()
        visit = door.talking(A)
        door.table.over(visit)
        await asyncio.sleep(10)
        assert door.table.begin(visit, Purpose.MEET)
        await asyncio.sleep(FIRST_FRAME_S + 1)
        assert door.dropped_s == {visit: pytest.approx(10 + FIRST_FRAME_S)}

    virtual_time.run(main())


def test_a_banned_peer_cannot_start_a_call() -> None:
    def test() -> None:
        banned: set[PeerId] = set()
        door = Door(StreamCaps(), lambda partner: partner in banned)
        visit = door.talking(A)
        door.table.over(visit)
        banned.add(A)
        assert not door.table.begin(visit, Purpose.MEET)

    play(test)


def test_the_connections_of_one_network_are_limited() -> None:
    def test() -> None:
        door = Door(StreamCaps(per_network=4, total=8))
        crowd = [door.talking(seeded(number).peer_id, observed=f"/ip4/6.6.{number}.1/tcp/9") for number in range(10, 14)]
        assert door.admit(A, "/ip4/6.6.99.1/tcp/9") is None
        assert door.admit(A, "/ip4/6.7.0.1/tcp/9")
        assert not door.dropped_s
        door.table.over(crowd[2])
        assert door.admit(B, "/ip4/6.6.99.1/tcp/9"), "of its own network, one whose conversation is over gives way"
        assert list(door.dropped_s) == [crowd[2]]

    play(test)


def test_peers_on_the_local_network_do_not_share_a_limit() -> None:
    def test() -> None:
        door = Door(StreamCaps(per_network=1))
        for number in range(10, 14):
            door.talking(seeded(number).peer_id, observed=f"/ip4/192.168.1.{number}/tcp/9")

    play(test)


def test_a_stalled_call_is_replaced_after_ten_seconds_and_an_active_one_is_not() -> None:
    async def main() -> None:
        door = Door(StreamCaps(total=3))
        crowd = [door.talking(peer, observed="/ip4/6.6.0.1/tcp/9") for peer in (A, B)]
        door.talking(C, observed="/ip4/8.8.0.1/tcp/9")
        door.carried_bytes = 5000
        assert door.admit(D) is None
        await asyncio.sleep(STALLED_S - 0.1)
        door.carried_bytes += STALLED_BYTES - 1
        assert door.admit(D) is None
        await asyncio.sleep(0.1)
        door.talking(D)
        assert [visit in crowd for visit in door.dropped_s] == [True], "one of the network that has the most"
        door.carried_bytes += STALLED_BYTES
        assert door.admit(seeded(9).peer_id) is None

    virtual_time.run(main())


def test_no_newcomer_is_kept_out_by_calls_that_trickle() -> None:
    """Strangers that fill the table and send 1,100 bytes every 10 s have kept out 120 of 120 newcomers."""

    async def main() -> None:
        door = Door()
        for number in range(100, 164):
            door.admit(seeded(number).peer_id, f"/ip4/6.{number}.0.1/tcp/9")
        crowd = [visit for visit in door.table._visits if door.table.begin(visit, Purpose.MEET) and door.table.heard(visit)]
        num_admitted = 0
        for number in range(1000, 1120):
            await asyncio.sleep(10)
            door.carried_bytes += 1100
            visit = door.admit(seeded(number).peer_id, f"/ip4/8.{number % 250}.0.1/tcp/9")
            num_admitted += visit is not None
            if visit is not None:
                door.table.end(visit)
        assert len(crowd) == StreamCaps().strangers
        assert num_admitted >= 115, "all, once the crowd has been there for LEAST_RATE_S"

    virtual_time.run(main())


def test_a_call_at_the_slowest_legal_rate_is_not_replaced() -> None:
    async def main() -> None:
        door = Door(StreamCaps(total=2))
        door.talking(A)
        door.talking(B)
        for _ in range(600):
            await asyncio.sleep(1)
            door.carried_bytes += SLOWEST_BYTES_PER_S
            assert door.admit(C) is None
        assert not door.dropped_s

    virtual_time.run(main())


def test_a_call_may_be_slow_before_its_payload() -> None:
    async def main() -> None:
        door = Door(StreamCaps(total=1))
        door.talking(A)
        for _ in range(int(LEAST_RATE_S) // 5):
            await asyncio.sleep(5)
            door.carried_bytes += STALLED_BYTES
            assert door.admit(C) is None

    virtual_time.run(main())


def test_strangers_leave_places_to_those_whom_this_peer_has_met() -> None:
    def test() -> None:
        met = {A, B}
        door = Door(StreamCaps(total=4, strangers=2), has_met=met.__contains__)
        door.talking(C)
        door.talking(D)
        assert door.admit(seeded(9).peer_id) is None
        door.talking(A)
        door.talking(B)
        assert not door.dropped_s

    play(test)


def test_a_stranger_may_replace_the_idle_connection_of_someone_met_where_strangers_have_places_left() -> None:
    def test() -> None:
        door = Door(StreamCaps(total=3, strangers=2), has_met={A, B}.__contains__)
        over = door.talking(A)
        door.talking(A)
        door.talking(B)
        door.table.over(over)
        door.talking(C)
        assert list(door.dropped_s) == [over]

    play(test)


def test_strangers_of_its_network_do_not_keep_out_someone_met() -> None:
    def test() -> None:
        door = Door(StreamCaps(per_network=2), has_met={A}.__contains__)
        for partner in (B, C):
            door.talking(partner, observed="/ip4/6.6.0.1/tcp/9")
        assert door.admit(D, "/ip4/6.6.0.2/tcp/9") is None
        assert door.admit(A, "/ip4/6.6.0.3/tcp/9")

    play(test)


def test_the_calls_of_one_network_are_limited_in_number_and_those_of_others_pass() -> None:
    async def main() -> None:
        door = Door(has_met={A}.__contains__)

        def call(number: int, observed: str) -> bool:
            visit = door.admit(seeded(number).peer_id, observed)
            if visit is not None:
                door.table.end(visit)
            return visit is not None

        crowd = [call(number, "/ip4/6.6.0.1/tcp/9") for number in range(1000, 1500)]
        assert sum(crowd) == CALLS_FROM_ONE.capacity
        assert call(2000, "/ip4/8.8.0.1/tcp/9")
        assert door.admit(A, "/ip4/6.6.0.1/tcp/9"), "whom this peer has met has an allowance of its own"
        await asyncio.sleep(CALLS_FROM_ONE.refill_s / CALLS_FROM_ONE.capacity)
        assert call(2001, "/ip4/6.6.0.1/tcp/9")
        assert not call(2002, "/ip4/6.6.0.1/tcp/9")

    virtual_time.run(main())


def test_the_calls_of_all_strangers_are_limited_and_not_those_of_peers_met() -> None:
    def test() -> None:
        door = Door(has_met={A}.__contains__)
        num_admitted = 0
        for number in range(int(2 * CALLS_FROM_STRANGERS.capacity)):
            visit = door.admit(B, f"/ip4/{6 + number // 250}.{number % 250}.0.1/tcp/9")
            if visit is not None:
                num_admitted += 1
                door.table.end(visit)
        assert num_admitted == CALLS_FROM_STRANGERS.capacity
        assert door.admit(A)

    play(test)


def test_further_calls_on_one_connection_are_limited_too() -> None:
    def test() -> None:
        door = Door()
        visit = door.admitted(A)
        calls = []
        for _ in range(int(2 * CALLS_FROM_ONE.capacity)):
            calls.append(door.table.begin(visit, Purpose.FETCH))
            door.table.over(visit)
        assert sum(calls) == CALLS_FROM_ONE.capacity

    play(test)
