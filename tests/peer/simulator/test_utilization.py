from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.utilization import PAPER_BITS, WORKLOADS, grid_errors, sendings
from peer.simulator.links import Links
from peer.simulator.matching import MEETING_INTERVAL
from peer.simulator.network import Network, report
from peer.simulator.utilization import (
    GRID,
    Workload,
    compute_utilization,
    data_parallel,
    diloco,
    gossip_utilization,
    streaming,
)
from tests.peer.simulator.test_matching import meetings_per_step

WIDTHS = {16.0: "bf16", 32.0: "fp32"}
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
    full = 1e9 * 4.0 / (MEETING_INTERVAL * 25 * 0.1)  # bits per second that meetings need
    assert gossip_utilization(SMALL, 4.0, 25, np.array([full * 2, full, full / 2])) == pytest.approx([1.0, 1.0, 0.5])


def test_the_link_is_full_when_it_carries_just_the_meetings_that_peers_make() -> None:
    """Meetings on demand, counted: what a peer sends per second is the bandwidth from which on nothing is lost."""
    sent = meetings_per_step(16, 40, 40) * 1e9 * 4.0 / 0.1
    shares = gossip_utilization(SMALL, 4.0, 40, np.array([1.05, 1.0, 0.5]) * sent)
    assert shares[0] == 1.0
    assert shares[1:] == pytest.approx([1.0, 0.5], rel=0.03)


def test_the_codec_decides_the_bits_of_every_method() -> None:
    """Methods at equal widths: with 32 bits each needs the time of 32 bits."""
    links, work = Links(bandwidth=2e9), replace(SMALL, num_params=1e10)
    shares = {bits: report(Network(8, name, 100, links, work))["compute_utilization_by_method"] for bits, name in WIDTHS.items()}
    for bits, found in shares.items():
        for name, sending in (
            ("ddp", data_parallel(work, bits)),
            ("diloco", diloco(work, bits)),
            ("streaming", streaming(work, bits, overlap_steps=1)),
        ):
            assert found[name] == compute_utilization(work, sending, np.array([2e9]))[0]
    assert all(shares[32.0][name] < shares[16.0][name] for name in shares[16.0])


def test_fragments_cover_all_layers_once_a_period() -> None:
    sending = streaming(WORKLOADS["10B"], PAPER_BITS)
    sent = [layer for step in range(sending.period_steps) for layer in sending.layers_at(step)]
    assert sorted(sent) == list(range(48))
    assert len(GRID) == 50
