from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peer.simulator.links import Links
from peer.simulator.network import Network, report
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


@pytest.mark.parametrize(
    "values",
    [
        {"num_peers": 1},
        {"codec": "modul4"},
        {"links": Links(latency_s=0.0)},
        {"links": Links(bandwidth=-1.0)},
        {"links": Links(variation=float("nan"))},
        {"workload": Workload(float("inf"), 2, 1.0)},
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(BadSettings):
        replace(NETWORK, **values)
