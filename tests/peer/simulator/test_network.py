from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from gossamer.optim.fragments import MEETING_INTERVAL
from gossamer.peer.simulator import network
from gossamer.peer.simulator.network import (
    GREATEST,
    MAX_PEERS,
    NUM_HANDSHAKES,
    NUM_SWAPS,
    SMALLEST,
    TOTAL_DRAWS,
    Floats,
    Links,
    Network,
    Workload,
    compute_utilization,
    gossip_utilization,
    group_slowdown,
    meeting_seconds,
    pair_slowdown,
    report,
    ring_seconds,
    streaming,
    tree_seconds,
    waiting,
)
from gossamer.protocol.errors import BadSettings
from tests.peer.simulator.streaming_table import GRID, PAPER_BITS, WORKLOADS, data_parallel, diloco, grid_errors, sendings
from tests.peer.simulator.test_matching import meetings_per_step

EVEN = Links(latency_s=1.0, variation=0.0, bandwidth=8.0)


def random(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_latencies_have_the_mean_and_spread_that_were_asked_for() -> None:
    times = Links(0.2, 0.5).draw(random(), (400_000,))
    assert times.mean() == pytest.approx(0.2, rel=0.01)
    assert times.std() / times.mean() == pytest.approx(0.5, rel=0.02)


def test_bytes_take_their_time() -> None:
    assert EVEN.draw(random(), (3,), num_bytes=5.0) == pytest.approx([6.0, 6.0, 6.0])


def swap_seconds(links: Links, num_pairs: int) -> float:
    """The mean time in which two peers send each other an empty message."""
    return float(links.draw(random(), (num_pairs, 2)).max(1).mean())


def test_a_swap_is_the_longer_of_two_sends() -> None:
    """Of log-normal times with log-variance s^2: (1 + erf(s / 2)) means (NoLoCo, section 5.3)."""
    sigma = math.sqrt(math.log1p(1.0))
    assert swap_seconds(Links(1.0, 1.0), 400_000) == pytest.approx(1 + math.erf(sigma / 2), rel=0.01)


def test_a_meeting_is_a_handshake_and_some_swaps() -> None:
    assert meeting_seconds(EVEN, 3.0, 10, random()) == pytest.approx(NUM_HANDSHAKES + NUM_SWAPS + 3.0)


@pytest.mark.parametrize("num_peers", [4, 16, 64, 1024])
def test_on_even_links_a_tree_takes_two_sends_per_level(num_peers: int) -> None:
    assert tree_seconds(EVEN, 0.0, num_peers, 2, random()) == pytest.approx(2 * math.log2(num_peers))


@pytest.mark.parametrize(("num_peers", "variation", "ratio"), [(4, 0.5, 2.1), (16, 1.0, 5.2), (64, 1.5, 10.4), (256, 0.5, 9.7)])
def test_a_tree_over_a_local_pair_is_as_in_the_paper(num_peers: int, variation: float, ratio: float) -> None:
    links = Links(1.0, variation)
    pair = 2 * swap_seconds(links, 200_000)  # to the root and back
    assert tree_seconds(links, 0.0, num_peers, 200_000 // num_peers, random()) / pair == pytest.approx(ratio, rel=0.03)


def test_a_ring_takes_two_rounds_of_pieces() -> None:
    assert ring_seconds(EVEN, 8.0, 8, 1, random()) == pytest.approx(14 * (1.0 + 1.0))
    assert ring_seconds(EVEN, 8.0, 1, 1, random()) == 0.0


def test_the_time_of_a_large_ring_is_bounded_by_its_bandwidth() -> None:
    links = Links(1.0, 0.5)
    small, large = ring_seconds(links, 0.0, 1024, 1, random()), ring_seconds(links, 0.0, 1_000_000, 1, random())
    assert large / small == pytest.approx(1_000_000 / 1024, rel=0.01)


def test_a_million_peers_meet() -> None:
    few, many = (meeting_seconds(Links(0.05, 0.5), 1e6, num_pairs, random()) for num_pairs in (10_000, 500_000))
    assert many == pytest.approx(few, rel=0.02)  # flat in the swarm's size


# ---------------------------------------------------------------------- waiting


@pytest.mark.parametrize(("num_peers", "inner_steps", "ratio"), [(16, 100, 1.07), (64, 100, 1.11), (256, 100, 1.15), (1024, 100, 1.19)])
def test_groups_wait_longer_than_pairs_as_in_the_paper(num_peers: int, inner_steps: int, ratio: float) -> None:
    """NoLoCo's Figure 5B, as re-simulated from its model."""
    found = waiting(num_peers, inner_steps, 60, random(2))
    assert found["group"] / found["pairs"] == pytest.approx(ratio, abs=0.02)


def test_one_peer_waits_for_nothing() -> None:
    assert group_slowdown(1, 10, 5, random(2)) == 1.0
    assert pair_slowdown(1, 10, 5, random(2)) == 1.0


def test_two_peers_are_a_group() -> None:
    assert pair_slowdown(2, 10, 400, random(2)) == pytest.approx(group_slowdown(2, 10, 400, random(2)), rel=0.03)


def test_a_large_swarm_is_quick_to_simulate() -> None:
    found = waiting(100_000, 5, 10, random(2))
    assert found["group"] > 2.0 > 1.5 > found["pairs"] > 1.0


class Counting:
    """Stands in for a generator: every inner step takes the same time; counts what is drawn."""

    def __init__(self) -> None:
        self.num_draws = 0
        self.num_rounds = 0  # of pairs

    def normal(self, mean: float, sigma: float, shape: tuple[int, ...]) -> Floats:
        self.num_draws += math.prod(shape)
        return np.zeros(shape)

    def permutation(self, count: int) -> npt.NDArray[np.int64]:
        self.num_rounds += 1
        return np.arange(count)


@pytest.mark.parametrize(("inner_steps", "num_rounds"), [(1, 100), (25, 100), (1000, 100), (200_000, 2)])
def test_long_rounds_of_pairs_cost_no_more_than_others(monkeypatch: pytest.MonkeyPatch, inner_steps: int, num_rounds: int) -> None:
    """First there are fewer pairs; rounds are dropped only after that, for delays spread from round to round."""
    counting = Counting()
    monkeypatch.setattr(network, "group_slowdown", lambda *_: 1.0)
    assert waiting(5000, inner_steps, 100, cast(np.random.Generator, counting))["pairs"] == pytest.approx(1.0)
    assert counting.num_draws <= max(TOTAL_DRAWS, 2 * 64 * inner_steps)
    assert counting.num_rounds == num_rounds


# ---------------------------------------------------------------------- utilization


WIDTHS = {16.0: "bf16", 32.0: "fp32"}
SMALL = Workload(1e9, 24, 0.1)


def test_the_table_of_streaming_diloco_comes_out() -> None:
    """Table 4: at least 70 of 75 entries exact, none more than one point of its grid away."""
    errors = grid_errors()
    assert len(errors) == 75
    assert sum(error == 0 for error in errors) >= 70
    assert max(abs(error) for error in errors) == 1


def test_a_fast_link_costs_nothing_and_a_slow_one_nearly_everything() -> None:
    for sending in (data_parallel(16.0), diloco(16.0), streaming(SMALL, 4.0, overlap_steps=1)):
        slow, fast = compute_utilization(SMALL, sending, np.array([1e3, 1e18]))
        assert fast == pytest.approx(1.0)
        assert slow < 0.01


def test_blocking_diloco_follows_the_closed_form() -> None:
    """CU = H T / (H T + N b / B), but for the part of the sending that overlaps its own backward pass."""
    bandwidth = np.array([2e9])
    exact = 100 * 0.1 / (100 * 0.1 + 1e9 * 16.0 / 2e9)
    assert compute_utilization(SMALL, diloco(16.0), bandwidth)[0] == pytest.approx(exact, rel=0.01)


def test_overlap_and_fewer_bits_need_less_bandwidth() -> None:
    reached = [compute_utilization(SMALL, sending, GRID) >= 0.95 for sending in (data_parallel(16.0), *sendings(SMALL, 16.0)[1:])]
    needs = [float(GRID[int(np.argmax(enough))]) for enough in reached]
    assert all(enough.any() for enough in reached)
    assert needs == sorted(needs, reverse=True)
    assert needs[-1] < needs[0] / 100


def test_a_link_of_the_grid_can_be_too_slow_for_a_huge_model() -> None:
    huge = Workload(1e14, 8, 0.001)
    assert float(compute_utilization(huge, data_parallel(16.0), GRID).max()) < 0.99


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
            ("ddp", data_parallel(bits)),
            ("diloco", diloco(bits)),
            ("streaming", streaming(work, bits, overlap_steps=1)),
        ):
            assert found[name] == compute_utilization(work, sending, np.array([2e9]))[0]
    assert all(shares[32.0][name] < shares[16.0][name] for name in shares[16.0])


def test_fragments_cover_all_layers_once_a_period() -> None:
    sending = streaming(WORKLOADS["10B"], PAPER_BITS)
    sent = [layer for step in range(sending.period_steps) for layer in sending.layers_at(step, 48)]
    assert sorted(sent) == list(range(48))
    assert len(GRID) == 50


# ---------------------------------------------------------------------- the report


NETWORK = Network(16, "modulo4", 5, workload=Workload(1e8, 6, 1.0))


def test_the_report_has_the_keys_of_the_contract() -> None:
    found = report(NETWORK)
    assert list(found)[:3] == ["peers", "sync_seconds", "compute_utilization"]
    assert set(found["sync_seconds"]) == {"gossip", "ring", "tree"}
    assert 0.0 < found["compute_utilization"] <= 1.0
    assert found["bits_per_param"] == 4.140625
    assert set(found["compute_utilization_by_method"]) == {"ddp", "diloco", "streaming", "gossip"}


def test_a_meeting_takes_as_long_in_any_swarm_and_all_reduces_longer() -> None:
    small, large = (report(replace(NETWORK, num_peers=num_peers))["sync_seconds"] for num_peers in (4, 128))
    assert large["gossip"] == pytest.approx(small["gossip"], rel=0.02)
    assert large["ring"] > small["ring"]
    assert large["tree"] > 3 * small["tree"]


def test_equal_seeds_give_equal_reports() -> None:
    assert report(NETWORK) == report(NETWORK) != report(replace(NETWORK, seed=1))


NOT_SIZES = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-300, 1e300)


@pytest.mark.parametrize("value", NOT_SIZES)
@pytest.mark.parametrize(
    ("option", "changed"),
    [
        ("--latency", lambda value: {"links": Links(latency_s=value)}),
        ("--bandwidth", lambda value: {"links": Links(bandwidth=value)}),
        ("--params", lambda value: {"workload": Workload(value, 6, 1.0)}),
        ("--step-seconds", lambda value: {"workload": Workload(1e8, 6, value)}),
    ],
)
def test_sizes_are_numbers_above_zero(option: str, changed: Callable[[float], dict[str, Any]], value: float) -> None:
    with pytest.raises(BadSettings, match=f"{option} must be a number between 1e-09 and 1e.18, and is") as caught:
        replace(NETWORK, **changed(value))
    assert caught.value.hint


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 100.0])
def test_latencies_cannot_vary_without_bound(value: float) -> None:
    with pytest.raises(BadSettings, match="--variation must satisfy 0 <= variation < 100, and is"):
        replace(NETWORK, links=Links(variation=value))


@pytest.mark.parametrize(
    ("values", "reason", "hint"),
    [
        ({"num_peers": 1}, "--peers must lie between 2 and", "raise --peers"),
        ({"num_peers": 10**12}, "--peers must lie between 2 and 10000000 with --network, and is 1000000000000", "lower --peers"),
        ({"inner_steps": 10**9}, "--inner-steps must lie between 1 and 10000", "lower --inner-steps"),
        ({"workload": Workload(1e8, 10**9, 1.0)}, "--layers must lie between 1 and 1000", "lower --layers"),
        ({"workload": Workload(1e8, 0, 1.0)}, "--layers must lie between 1 and 1000", "raise --layers"),
        ({"num_peers": MAX_PEERS, "inner_steps": 1000}, "10000000 peers of 1000 inner steps each are too many", "--peers 500000 would do"),
    ],
)
def test_a_simulation_that_would_never_end_is_refused(values: dict[str, Any], reason: str, hint: str) -> None:
    with pytest.raises(BadSettings, match=reason) as caught:
        replace(NETWORK, **values)
    assert hint in caught.value.hint


def test_the_largest_swarm_with_the_default_meetings_is_allowed() -> None:
    assert replace(NETWORK, num_peers=MAX_PEERS, inner_steps=25).num_peers == MAX_PEERS


@pytest.mark.parametrize("links", [Links(GREATEST, 99.0, 1e6 * SMALLEST), Links(SMALLEST, 0.0, 1e6 * GREATEST)])
@pytest.mark.parametrize("workload", [Workload(GREATEST, 2, SMALLEST), Workload(SMALLEST, 2, GREATEST), Workload(GREATEST, 2, GREATEST)])
def test_all_that_is_allowed_is_valid_json(links: Links, workload: Workload) -> None:
    json.dumps(report(replace(NETWORK, links=links, workload=workload)), allow_nan=False)
