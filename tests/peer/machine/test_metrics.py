"""What Prometheus reads of a peer: its own parser understands it, the reference names all of it, and it stays on this machine."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gossamer.peer.machine.metrics import StatusMetrics, serving_metrics
from gossamer.peer.machine.partners import Partner
from gossamer.peer.machine.states import STATES
from gossamer.peer.machine.status import Status
from gossamer.protocol.errors import BadSettings
from tests.unused_port import unused_port

ROOT = Path(__file__).parents[3]
STATUS = Status(
    "training", "meeting others", 5.0, "", "ab", "12D3KooX", step=7, total_steps=9, tokens=90, loss=2.5, eval_loss=2.25,
    bytes={"sent": 10, "received": 20}, partners={"x": Partner("x", "direct")}, blocked_seconds=0.5, flops=(1e6, 1e12),
)  # fmt: skip


def scraped(status: Status) -> dict[tuple[str, ...], float]:
    """Every sample, by its name and the values of its labels."""
    port = unused_port()
    with serving_metrics("127.0.0.1", port, lambda: status):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Connection": "close"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


STAGED = replace(
    STATUS, stage="2 of 3", stage_holders=[2, 1, 0], starved_seconds=4.5,
    hops={"outcomes": {"answered": 9, "declined": 1}, "repeated": 3, "late": 2, "sent": 70, "received": 80},
    lanes=[
        {"partner": "12D3KooA", "stage": 3, "hops": 9, "unanswered": 2, "window": 4, "usual_s": 1.5},
        {"partner": "12D3KooB", "stage": 1, "hops": 9, "unanswered": 1, "window": 4, "usual_s": None},
    ],
)  # fmt: skip


def test_hops_lanes_and_holders_can_be_scraped() -> None:
    read = scraped(STAGED)
    assert read["gossamer_hops_total", "answered"] == 9 and read["gossamer_hops_total", "declined"] == 1
    assert (read["gossamer_hops_repeated_total",], read["gossamer_hops_late_total",]) == (3, 2)
    assert (read["gossamer_hop_bytes_total", "sent"], read["gossamer_starved_seconds_total",]) == (70, 4.5)
    assert [read["gossamer_stage_holders", str(stage)] for stage in (1, 2, 3)] == [2, 1, 0] and read["gossamer_stage",] == 2
    assert read["gossamer_lane_unanswered_hops", "12D3KooB"] == 1
    assert read["gossamer_lane_answer_seconds", "12D3KooA"] == 1.5 and ("gossamer_lane_answer_seconds", "12D3KooB") not in read


def test_the_status_can_be_scraped() -> None:
    read = scraped(STATUS)
    assert read["gossamer_train_loss_nats",] == 2.5
    assert read["gossamer_meeting_bytes_total", "sent"] == 10
    assert read["gossamer_connections", "direct"] == 1
    assert {state: value for (name, state), value in ((key, read[key]) for key in read if key[0] == "gossamer_state")} == {
        state: float(state == "training") for state in STATES
    }


def test_no_counter_goes_back_with_a_trainer_that_starts_from_a_checkpoint() -> None:
    """Prometheus would take it for a new start, and count all tokens of the peer once more."""
    statuses = [replace(STATUS, own_steps=steps, tokens=10 * steps) for steps in (100, 80, 110)]
    metrics = StatusMetrics(lambda: statuses.pop(0))
    read = [{sample.name: sample.value for family in metrics.collect() for sample in family.samples} for _ in range(3)]
    assert [each["gossamer_inner_steps_total"] for each in read] == [100, 100, 110]
    assert [each["gossamer_tokens_total"] for each in read] == [1000, 1000, 1100]


def test_what_is_not_known_yet_is_not_there() -> None:
    assert ("gossamer_train_loss_nats",) not in scraped(Status())


def test_the_reference_names_every_metric() -> None:
    described = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "reference" / "metrics.md").read_text(), re.MULTILINE)
    assert sorted(described) == sorted({key[0] for key in scraped(STAGED)})


def test_the_dashboard_of_grafana_asks_for_metrics_that_are_there() -> None:
    asked = set(re.findall(r"gossamer_\w+", (ROOT / "docker" / "watch" / "dashboards" / "gossamer.json").read_text()))
    assert len(asked) > 10
    assert asked <= {key[0] for key in scraped(STATUS)}


def test_a_busy_port_is_refused(busy_port: int) -> None:
    with pytest.raises(BadSettings, match="in use"), serving_metrics("127.0.0.1", busy_port, Status):
        pass
