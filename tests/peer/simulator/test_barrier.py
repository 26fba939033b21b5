from __future__ import annotations

import numpy as np
import pytest

from peer.simulator import barrier
from peer.simulator.barrier import TOTAL_DRAWS, group_slowdown, pair_slowdown, waiting


def random() -> np.random.Generator:
    return np.random.default_rng(2)


@pytest.mark.parametrize(("num_peers", "inner_steps", "ratio"), [(16, 100, 1.07), (64, 100, 1.11), (256, 100, 1.15), (1024, 100, 1.19)])
def test_groups_wait_longer_than_pairs_as_in_the_paper(num_peers: int, inner_steps: int, ratio: float) -> None:
    """NoLoCo's Figure 5B, as re-simulated from its model."""
    assert waiting(num_peers, inner_steps, 60, random()).ratio == pytest.approx(ratio, abs=0.02)


def test_nobody_waits_for_nobody() -> None:
    assert group_slowdown(1, 10, 5, random()) == 1.0
    assert pair_slowdown(1, 10, 5, random()) == 1.0


def test_two_peers_are_a_group() -> None:
    assert pair_slowdown(2, 10, 400, random()) == pytest.approx(group_slowdown(2, 10, 400, random()), rel=0.03)


def test_a_large_swarm_is_quick_to_simulate() -> None:
    found = waiting(100_000, 5, 10, random())
    assert found.group > 2.0 > 1.5 > found.pairs > 1.0


@pytest.mark.parametrize(("inner_steps", "num_rounds"), [(1, 100), (25, 100), (1000, 100), (200_000, 2)])
def test_long_rounds_of_pairs_cost_no_more_than_others(monkeypatch: pytest.MonkeyPatch, inner_steps: int, num_rounds: int) -> None:
    """First there are fewer pairs; rounds are dropped only after that, for delays spread from round to round."""
    rounds: list[int] = []

    def drawn(num_peers: int, inner_steps: int, random: np.random.Generator) -> barrier.Floats:
        rounds.append(num_peers * inner_steps)
        return np.ones(num_peers)

    monkeypatch.setattr(barrier, "_round", drawn)
    monkeypatch.setattr(barrier, "group_slowdown", lambda *_: 1.0)
    waiting(5000, inner_steps, 100, random())
    assert sum(rounds) <= max(TOTAL_DRAWS, 2 * 64 * inner_steps)
    assert len(rounds) == num_rounds
