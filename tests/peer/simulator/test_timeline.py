from __future__ import annotations

from fractions import Fraction

from peer.simulator.timeline import Presence, step_ends

ALWAYS = Presence(seed=0, drop_out=0.0, period=5)


def test_equal_peers_arrive_together() -> None:
    assert list(step_ends([Fraction(1)] * 3, 2, ALWAYS)) == [(1, [0, 1, 2]), (2, [0, 1, 2])]


def test_each_peer_keeps_its_own_rate_exactly() -> None:
    rates = [Fraction(8, 5), Fraction(2, 5)]
    times = list(step_ends(rates, 50, ALWAYS))
    assert [sum(peer in peers for _, peers in times) for peer in range(2)] == [80, 20]
    assert [now for now, peers in times if peers == [0, 1]] == [Fraction(5, 2) * n for n in range(1, 21)]  # no rounding in between


def test_absences_follow_from_the_seed_and_spare_the_first_period() -> None:
    presence = Presence(seed=3, drop_out=0.5, period=5)
    away = [presence.is_away(0, now) for now in range(100)]
    assert not any(away[:5])
    assert away == [Presence(3, 0.5, 5).is_away(0, now) for now in range(100)]
    assert all(len(set(away[start : start + 5])) == 1 for start in range(0, 100, 5))
    assert 20 < sum(away) < 75


def test_nobody_steps_while_away() -> None:
    presence = Presence(seed=1, drop_out=0.4, period=4)
    for now, peers in step_ends([Fraction(1)] * 3, 60, presence):
        assert not any(presence.is_away(peer, now - 1) for peer in peers)  # unit steps begin one unit earlier


def test_a_peer_returns_when_a_period_begins() -> None:
    presence = Presence(seed=1, drop_out=0.6, period=4)
    for peer in range(20):
        back = presence.back_at(peer, Fraction(9, 2))
        assert not presence.is_away(peer, back)
        assert back == Fraction(9, 2) or back % 4 == 0
