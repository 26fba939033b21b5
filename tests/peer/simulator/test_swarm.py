"""Swarms of real nodes, simulated: whatever happens to them nothing is violated, and a seed is a swarm."""

from __future__ import annotations

from dataclasses import replace

from gossamer.peer.simulator.swarm import ENOUGH, Spread, SwarmScene, simulate_swarm
from gossamer.protocol.run.manifest import Manifest

ROUGH = SwarmScene(peers=8, cut_s=60.0, churn=5.0, loss=0.05, skew_s=3600.0, reachable=0.3)


def test_a_rough_life_violates_nothing() -> None:
    found = simulate_swarm(ROUGH, Manifest())
    assert found.violations == []
    assert 3 <= found.reachable < 8 < ENOUGH and found.kills > 3
    assert found.know_enough_s is not None and found.know_enough_s.worst < 30.0
    assert found.healed_s is not None and found.healed_s.worst <= 60.0
    assert found.background_bytes_per_s is not None and found.background_bytes_per_s.worst < 20_000
    assert found.meetings["completed"] > 10


def test_a_seed_is_a_swarm() -> None:
    scene = SwarmScene(peers=3, cut_s=0.0, loss=0.05)
    found = simulate_swarm(scene, Manifest())
    assert simulate_swarm(scene, Manifest()) == found != simulate_swarm(replace(scene, seed=1), Manifest())


def test_figures_of_many_peers() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 3.0, 3.0)
    assert Spread.of(range(1, 101)) == Spread(51, 95, 100)
