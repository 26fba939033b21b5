from __future__ import annotations

import numpy as np
import pytest

from benchmarks.utilization import PAPER_BITS, WORKLOADS, grid_errors, sendings
from peer.simulator.utilization import (
    GRID,
    Workload,
    compute_utilization,
    data_parallel,
    diloco,
    gossip_utilization,
    streaming,
)

SMALL = Workload(1e9, 24, 0.1)


def test_the_table_of_streaming_diloco_comes_out() -> None:
    """Table 4: at least 70 of 75 entries exact, none more than one point of its grid away."""
    errors = grid_errors()
    assert len(errors) == 75
    assert sum(error == 0 for error in errors) >= 70
    assert max(abs(error) for error in errors) == 1


def test_a_fast_link_costs_nothing_and_a_slow_one_nearly_everything() -> None:
    for sending in (data_parallel(SMALL, 16.0), diloco(SMALL, 16.0), streaming(SMALL, 4.0, overlap_steps=1)):
        slow, fast = compute_utilization(SMALL, sending, np.array([1e3, 1e18]))
        assert fast == pytest.approx(1.0)
        assert slow < 0.01


def test_blocking_diloco_follows_the_closed_form() -> None:
    """CU = H T / (H T + N b / B), but for the part of the sending that overlaps its own backward pass."""
    bandwidth = np.array([2e9])
    exact = 100 * 0.1 / (100 * 0.1 + 1e9 * 16.0 / 2e9)
    assert compute_utilization(SMALL, diloco(SMALL, 16.0), bandwidth)[0] == pytest.approx(exact, rel=0.01)


def test_overlap_and_fewer_bits_need_less_bandwidth() -> None:
    reached = [compute_utilization(SMALL, sending, GRID) >= 0.95 for sending in (data_parallel(SMALL, 16.0), *sendings(SMALL, 16.0)[1:])]
    needs = [float(GRID[int(np.argmax(enough))]) for enough in reached]
    assert all(enough.any() for enough in reached)
    assert needs == sorted(needs, reverse=True)
    assert needs[-1] < needs[0] / 100


def test_a_link_of_the_grid_can_be_too_slow_for_a_huge_model() -> None:
    huge = Workload(1e14, 8, 0.001)
    assert float(compute_utilization(huge, data_parallel(huge, 16.0), GRID).max()) < 0.99


def test_meetings_in_the_background_cost_nothing_until_the_link_is_full() -> None:
    full = 1e9 * 4.0 / (25 * 0.1)  # bits per second that a period's meetings need
    assert gossip_utilization(SMALL, 4.0, 25, np.array([full * 2, full, full / 2])) == pytest.approx([1.0, 1.0, 0.5])


def test_fragments_cover_all_layers_once_a_period() -> None:
    sending = streaming(WORKLOADS["10B"], PAPER_BITS)
    sent = [layer for step in range(sending.period_steps) for layer in sending.layers_at(step)]
    assert sorted(sent) == list(range(48))
    assert len(GRID) == 50
