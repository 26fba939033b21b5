"""The time that a swarm agrees on: no single network sets a clock that several others, or this machine alone, can vouch for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gossamer.peer.swarm.swarm_time import LATELY_S, NETWORKS, PEERS, SwarmTime
from gossamer.protocol.limits import CLOCK_SKEW_S
from gossamer.protocol.memory.virtual_time import run
from tests.peer.neighbours import somebody

UNIX_S = 1_800_000_000.0
HOUR_S = 3600.0


def at(ahead_s: float = 0.0) -> Callable[[], float]:
    """A machine's clock that is so far ahead."""
    return lambda: UNIX_S + asyncio.get_running_loop().time() + ahead_s


def ahead_after(*voices: tuple[str, int, float], is_door: bool = False) -> float:
    """Return by how much a clock is set forward once it has heard these: network, peer, and how far that one is ahead."""

    async def main() -> float:
        clock = SwarmTime(at())
        for network, peer, ahead_s in voices:
            clock.heard(network, somebody(peer).peer_id, at(ahead_s)(), is_door=is_door)
        assert clock.now_s() == pytest.approx(at(clock.ahead_s)())
        assert bool(clock.warning) == (abs(clock.ahead_s) >= 10.0)
        return round(clock.ahead_s, 3)

    return run(main(), start_s=5.0)


@pytest.mark.parametrize(
    ("voices", "ahead_s"),
    [
        ([], 0.0),
        ([("a", 1, HOUR_S)], 0.0),
        ([("a", 1, HOUR_S), ("a", 2, HOUR_S)], HOUR_S),
        ([("a", 1, HOUR_S), ("b", 2, 0.5)], 0.5),
        ([("a", 1, HOUR_S), ("b", 2, HOUR_S + 1)], HOUR_S),
        ([("a", 1, -HOUR_S), ("b", 2, -HOUR_S), ("c", 3, -HOUR_S)], -HOUR_S),
        ([("a", 1, HOUR_S), ("b", 2, 0.1), ("c", 3, 0.2)], 0.1),
        ([*(("a", number, HOUR_S) for number in range(1, 9)), ("b", 20, 0.0), ("c", 21, 0.0)], 0.0),  # one network has one voice
        ([("a", 1, HOUR_S), ("a", 2, 1.0), ("a", 3, 1.0)], 1.0),
    ],
    ids=str,
)
def test_the_median_of_all_networks_and_our_own_clock_holds(voices: list[tuple[str, int, float]], ahead_s: float) -> None:
    assert ahead_after(*voices) == ahead_s


@pytest.mark.parametrize(
    ("ahead_s", "is_settled"),
    [((), True), ((1.0,), True), ((HOUR_S,), False), ((HOUR_S, HOUR_S), True), ((-60.0, 60.0, HOUR_S), False), ((0.0, 1.0, HOUR_S), True)],
    ids=str,
)
def test_the_time_is_settled_where_most_clocks_tell_it(ahead_s: tuple[float, ...], is_settled: bool) -> None:
    async def main() -> bool:
        clock = SwarmTime(at())
        for number, voice_s in enumerate(ahead_s, 1):
            clock.heard(str(number), somebody(number).peer_id, at(voice_s)())
        return clock.is_settled

    assert run(main()) == is_settled


def test_a_newcomer_believes_a_door_where_not_both_can_be_right() -> None:
    assert ahead_after(("a", 1, HOUR_S), is_door=True) == HOUR_S
    assert ahead_after(("a", 1, CLOCK_SKEW_S), is_door=True) == 0.0


def test_what_was_heard_long_ago_does_not_count() -> None:
    async def main() -> None:
        clock = SwarmTime(at())
        clock.heard("a", somebody(1).peer_id, at(HOUR_S)(), is_door=True)
        await asyncio.sleep(LATELY_S + 1.0)
        assert clock.ahead_s == 0.0 and not clock.warning

    run(main())


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
def test_a_clock_that_is_set_and_a_machine_that_slept_hear_anew(by_s: float) -> None:
    async def main() -> None:
        is_set = False

        def local_s() -> float:
            return at(0.0 if is_set else by_s)()

        clock = SwarmTime(local_s)
        for number, network in enumerate("abc", 1):
            clock.heard(network, somebody(number).peer_id, at()())
        assert clock.now_s() == pytest.approx(at()())
        is_set = True
        assert clock.now_s() == pytest.approx(at()())

    run(main())


def test_it_remembers_no_more_than_it_should() -> None:
    async def main() -> None:
        clock = SwarmTime(at())
        for number in range(2 * NETWORKS):
            for peer in range(2 * PEERS):
                clock.heard(str(number), somebody(1 + peer).peer_id, at()())
        assert len(clock._voices) == NETWORKS and all(len(peers) == PEERS for peers in clock._voices.values())

    run(main())
