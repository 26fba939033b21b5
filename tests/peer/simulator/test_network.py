from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from peer.simulator.links import Links
from peer.simulator.network import GREATEST, MAX_PEERS, SMALLEST, Network, report
from peer.simulator.utilization import Workload
from protocol.errors import BadSettings

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
    ("values", "says", "hint"),
    [
        ({"num_peers": 1}, "--peers must lie between 2 and", "raise --peers"),
        ({"num_peers": 10**12}, "--peers must lie between 2 and 10000000 with --network, and is 1000000000000", "lower --peers"),
        ({"inner_steps": 10**9}, "--inner-steps must lie between 1 and 10000", "lower --inner-steps"),
        ({"workload": Workload(1e8, 10**9, 1.0)}, "--layers must lie between 1 and 1000", "lower --layers"),
        ({"workload": Workload(1e8, 0, 1.0)}, "--layers must lie between 1 and 1000", "raise --layers"),
        ({"num_peers": MAX_PEERS, "inner_steps": 1000}, "10000000 peers of 1000 inner steps each are too many", "--peers 500000 would do"),
        ({"codec": "modul4"}, "no codec named 'modul4'", "modulo4"),
    ],
)
def test_what_would_never_end_is_refused(values: dict[str, Any], says: str, hint: str) -> None:
    with pytest.raises(BadSettings, match=says) as caught:
        replace(NETWORK, **values)
    assert hint in caught.value.hint


def test_the_largest_swarm_with_the_default_meetings_is_allowed() -> None:
    assert replace(NETWORK, num_peers=MAX_PEERS, inner_steps=25).num_peers == MAX_PEERS


@pytest.mark.parametrize("links", [Links(GREATEST, 99.0, 1e6 * SMALLEST), Links(SMALLEST, 0.0, 1e6 * GREATEST)])
@pytest.mark.parametrize("workload", [Workload(GREATEST, 2, SMALLEST), Workload(SMALLEST, 2, GREATEST), Workload(GREATEST, 2, GREATEST)])
def test_all_that_is_allowed_is_valid_json(links: Links, workload: Workload) -> None:
    json.dumps(report(replace(NETWORK, links=links, workload=workload)), allow_nan=False)
