"""What we answer with is bounded for each peer, each network and all together, and comes back with time."""

from __future__ import annotations

import pytest

from protocol.libp2p import budgets as module
from protocol.libp2p.budgets import IN_ALL, PER_NETWORK, PER_PEER, Budgets, Overload


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def spent(budgets: Budgets, peers: range, network: str, most: int = 10_000) -> int:
    """Spend kilobytes, by one peer after the other, until no more are given; return how many were."""
    given = 0
    for number in range(most):
        try:
            budgets.spend(peers[number % len(peers)], network, 1000)
            given += 1000
        except Overload:
            if len(peers) == 1:
                break
    return given


def test_a_peer_gets_what_is_saved_and_then_its_rate() -> None:
    clock = Clock()
    budgets = Budgets(clock)
    assert spent(budgets, range(1), "a") == PER_PEER.saved_bytes
    clock.now_s = 1.0
    assert spent(budgets, range(1), "a") == PER_PEER.bytes_per_s
    clock.now_s = 1000.0
    assert spent(budgets, range(1), "a") == PER_PEER.saved_bytes


def test_a_thousand_keys_of_one_network_get_what_the_network_gets() -> None:
    budgets = Budgets(Clock())
    assert spent(budgets, range(1000), "a") == PER_NETWORK.saved_bytes
    budgets.spend(2000, "b", 1000)


def test_all_together_get_no_more_than_the_line_can_spare() -> None:
    budgets = Budgets(Clock())
    assert sum(spent(budgets, range(100 * number, 100 * number + 100), str(number), 1000) for number in range(10)) == IN_ALL.saved_bytes


def test_who_is_refused_pays_nothing() -> None:
    budgets = Budgets(Clock())
    with pytest.raises(Overload):
        budgets.spend(1, "a", int(PER_PEER.saved_bytes) + 1)
    assert spent(budgets, range(1, 2), "a") == PER_PEER.saved_bytes


def test_a_flood_of_keys_is_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 10)
    budgets = Budgets(Clock())
    for number in range(1000):
        budgets.spend(number, "a", 1)
    assert len(budgets._buckets) <= 21
    assert spent(budgets, range(5000, 6000), "a") <= PER_NETWORK.saved_bytes - 1000 + 1000
