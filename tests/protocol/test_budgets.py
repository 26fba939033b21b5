"""Rate limits per peer, per network and in total."""

from __future__ import annotations

import pytest

from gossamer.protocol import budgets as module
from gossamer.protocol.budgets import Allowance, Budgets
from tests.clock import Clock

IN_ALL, PER_NETWORK, PER_PEER = Allowance(1000, 8.0), Allowance(256, 8.0), Allowance(64, 8.0)


def budgets(clock: Clock | None = None) -> Budgets:
    return Budgets(clock or Clock(), IN_ALL, PER_PEER, PER_NETWORK)


def taken(of: Budgets, peers: range, network: str) -> int:
    """Take one unit at a time for each peer until refused; return how many units were taken."""
    return sum(of.take(1, peer, network) for peer in peers for _ in range(int(PER_PEER.capacity) + 1))


def test_a_peer_gets_its_capacity_and_then_its_rate() -> None:
    clock = Clock()
    one = budgets(clock)
    assert taken(one, range(1), "a") == PER_PEER.capacity
    clock.now_s = 1.0
    assert taken(one, range(1), "a") == PER_PEER.capacity / PER_PEER.refill_s
    clock.now_s = 1000.0
    assert taken(one, range(1), "a") == PER_PEER.capacity


def test_a_thousand_peers_of_one_network_share_its_limit() -> None:
    one = budgets()
    assert taken(one, range(1000), "a") == PER_NETWORK.capacity
    assert one.take(1, 2000, "b")


def test_all_peers_together_share_the_total_limit() -> None:
    one = budgets()
    assert sum(taken(one, range(100 * number, 100 * number + 100), str(number)) for number in range(10)) == IN_ALL.capacity


def test_a_refused_request_is_not_charged() -> None:
    one = budgets()
    assert not one.take(PER_PEER.capacity + 1, 1, "a")
    assert taken(one, range(1, 2), "a") == PER_PEER.capacity


def test_a_flood_of_keys_evicts_the_oldest_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BUCKETS", 10)
    one = budgets()
    assert one.take(PER_PEER.capacity, 0, "a") and not one.take(1, 0, "a")
    assert all(one.take(1, number, "b") for number in range(1, 10))
    assert one.take(PER_PEER.capacity, 0, "a"), "the bucket of peer 0 should be forgotten, and so full again"
    assert all(one.take(1, number, "c") and len(one) <= 10 for number in range(100, 150))
    assert len(one) == 10
