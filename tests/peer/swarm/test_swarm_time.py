"""The swarm's time of day: no single network moves a clock that other networks or this machine contradict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from gossamer.peer.swarm.swarm_time import GROUPS, LATELY_S, NETWORKS, SwarmTime
from gossamer.peer.sync.client import Source
from gossamer.protocol.limits import CLOCK_SKEW_S
from gossamer.protocol.messages.replies import PeerList
from gossamer.protocol.tasks import loop_s
from tests.peer.neighbours import somebody

UNIX_S = 1_800_000_000.0
HOUR_S = 3600.0


def at(ahead_s: float = 0.0) -> Callable[[], float]:
    """Return a clock that is ahead by so much."""
    return lambda: UNIX_S + loop_s() + ahead_s


def ahead_after(*readings: tuple[str, int, float], is_bootstrap: bool = False) -> float:
    """Return the correction after these readings: network, peer, and by how much that peer's clock is ahead."""

    clock = SwarmTime(at())
    for network, peer, ahead_s in readings:
        clock.add_reading(network, somebody(peer).peer_id, at(ahead_s)(), is_bootstrap=is_bootstrap)
    assert clock.now_s() == pytest.approx(at(clock.ahead_s)())
    assert bool(clock.warning) == (abs(clock.ahead_s) >= 10.0)
    return round(clock.ahead_s, 3)


@pytest.mark.parametrize(
    ("readings", "ahead_s"),
    [
        ([], 0.0),
        ([("a", 1, HOUR_S)], 0.0),
        ([("a", 1, HOUR_S), ("a", 2, HOUR_S)], HOUR_S),
        ([("a", 1, HOUR_S), ("b", 2, 0.5)], 0.5),
        ([("a", 1, HOUR_S), ("b", 2, HOUR_S + 1)], HOUR_S),
        ([("a", 1, -HOUR_S), ("b", 2, -HOUR_S), ("c", 3, -HOUR_S)], -HOUR_S),
        ([("a", 1, HOUR_S), ("b", 2, 0.1), ("c", 3, 0.2)], 0.1),
        ([*(("a", number, HOUR_S) for number in range(1, 9)), ("b", 20, 0.0), ("c", 21, 0.0)], 0.0),  # one network has one reading
        ([("a", 1, HOUR_S), ("a", 2, 1.0), ("a", 3, 1.0)], 1.0),
    ],
    ids=str,
)
async def test_the_time_is_the_median_of_all_networks_and_our_own_clock(readings: list[tuple[str, int, float]], ahead_s: float) -> None:
    assert ahead_after(*readings) == ahead_s


@pytest.mark.parametrize(
    ("ahead_s", "is_agreed"),
    [((), True), ((1.0,), True), ((HOUR_S,), False), ((HOUR_S, HOUR_S), True), ((-60.0, 60.0, HOUR_S), False), ((0.0, 1.0, HOUR_S), True)],
    ids=str,
)
async def test_the_time_is_agreed_if_most_clocks_agree(ahead_s: tuple[float, ...], is_agreed: bool) -> None:
    clock = SwarmTime(at())
    for number, reading_s in enumerate(ahead_s, 1):
        clock.add_reading(str(number), somebody(number).peer_id, at(reading_s)())
    assert clock.is_agreed == is_agreed


async def test_a_newcomer_trusts_a_bootstrap_node_beyond_the_permitted_skew() -> None:
    assert ahead_after(("a", 1, HOUR_S), is_bootstrap=True) == HOUR_S
    assert ahead_after(("a", 1, CLOCK_SKEW_S), is_bootstrap=True) == 0.0


async def test_old_readings_do_not_count() -> None:
    clock = SwarmTime(at())
    clock.add_reading("a", somebody(1).peer_id, at(HOUR_S)(), is_bootstrap=True)
    await asyncio.sleep(LATELY_S + 1.0)
    assert clock.ahead_s == 0.0 and not clock.warning


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
async def test_setting_the_clock_or_a_sleep_discards_all_readings(by_s: float) -> None:
    is_set = False

    def local_s() -> float:
        return at(0.0 if is_set else by_s)()

    clock = SwarmTime(local_s)
    for number, network in enumerate("abc", 1):
        clock.add_reading(network, somebody(number).peer_id, at()())
    assert clock.now_s() == pytest.approx(at()())
    is_set = True
    assert clock.now_s() == pytest.approx(at()())


async def test_the_readings_are_bounded() -> None:
    clock = SwarmTime(at())
    for number in range(2 * NETWORKS):
        for peer in range(3 * GROUPS):
            clock.add_reading(str(number), somebody(1 + peer).peer_id, at(0.0 if peer < 2 * GROUPS else HOUR_S)())
    assert clock.ahead_s == pytest.approx(HOUR_S), "only the last peers of a network count"
    assert f"peers in {NETWORKS} networks" in clock.warning


async def test_a_member_does_not_set_the_clocks_of_others_through_many_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls through a relay is seen in the relay's network, and chooses the relay."""

    async def nothing(*asked: object, **more: object) -> None:
        return None

    clock = SwarmTime(at())
    for number, ahead_s in ((1, 0.5), (2, 0.4), *((number, -HOUR_S) for number in range(10, 16))):
        relay = f"/ip4/20.{number}.0.1/tcp/1"
        stream = SimpleNamespace(observed=relay if ahead_s > 0 else f"{relay}/p2p/{somebody(number).peer_id}/p2p-circuit")

        async def take(source: Source, there_s: float = at(ahead_s)()) -> tuple[None, bytes]:
            return None, PeerList((), round(1000 * there_s)).to_bytes()

        monkeypatch.setattr(Source, "ask", nothing)
        monkeypatch.setattr(Source, "take", take)
        await Source(None, stream).peer_list((), clock, is_bootstrap=False, group=somebody(9).peer_id)  # type: ignore[arg-type]
    assert clock.ahead_s == pytest.approx(0.0, abs=1.0)
