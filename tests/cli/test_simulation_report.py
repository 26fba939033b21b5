from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gossamer.cli.simulation_report import network_text, plot_rows, result_text, rows_text, sweep_text
from gossamer.peer.simulator.results import JSON_KEYS, Row
from gossamer.protocol.errors import BadSettings
from tests.peer.simulator.results import CURVE, result

ROWS = [
    Row({"learning_rate": 1e-3, "codec": "nf4"}, result(eval_loss_averaged=2.5)),
    Row({"learning_rate": 9.0, "codec": "nf4"}, None, "peer 0 diverged"),
    Row({"learning_rate": 4e-3, "codec": "nf4"}, result(eval_loss_averaged=2.0)),
]
NETWORK = {
    "peers": 8,
    "sync_seconds": {"gossip": 1.5, "ring": 20.0, "tree": 30.25},
    "compute_utilization": 0.75,
    "compute_utilization_by_method": {"ddp": 0.01, "diloco": 0.5, "streaming": 1.0, "gossip": 0.75},
    "barrier_slowdown": {"group": 1.5, "pairs": 1.2},
    "bits_per_param": 4.14,
    "params": 1.25e8,
    "inner_steps": 25,
}


def test_one_result_is_printed_as_sentences() -> None:
    text = result_text(result())
    assert "mean of 2 peers" in text
    assert "2.125 (2.000 to 2.250)" in text
    assert "noloco with modulo4: 12 exchanges, 1 alone; 4.14 bits per value, 2.5 MB sent per peer" in text
    assert "5000 tokens, 50 steps of virtual time" in text
    assert "dropped" not in text and "refused" not in text
    assert "12 exchanges, 1 alone, 2 refused;" in result_text(result(refused=2))


def test_a_result_with_attackers_says_how_many_hostile_messages_were_merged() -> None:
    text = result_text(result(peers=8, attackers=2, hostile=20, hostile_merged=3))
    assert "Attackers: 2 of 8 peers; 3 of 20 hostile messages merged." in text


def test_a_sweep_is_a_table_with_the_best_first() -> None:
    lines = sweep_text(ROWS).splitlines()
    assert lines[0].split()[:2] == ["learning_rate", "codec"]
    assert [line.split()[0] for line in lines[1:]] == ["0.004", "0.001", "9.0"]
    assert lines[3].split()[-1] == "diverged"
    assert len({len(line) for line in lines[:3]}) == 1


def test_json_is_one_object_with_the_keys_of_the_contract() -> None:
    single = json.loads(rows_text([Row({}, result())], as_json=True))
    assert list(single) == list(JSON_KEYS)
    swept = json.loads(rows_text(ROWS, as_json=True))["sweep"]
    assert swept[0]["settings"] == {"learning_rate": 1e-3, "codec": "nf4"}
    assert set(swept[0]) == {"settings", *JSON_KEYS}
    assert swept[1] == {"settings": {"learning_rate": 9.0, "codec": "nf4"}, "diverged": "peer 0 diverged"}


def test_text_output_is_sentences_for_one_result_and_a_table_for_more() -> None:
    assert rows_text([Row({}, result())], as_json=False) == result_text(result())
    assert rows_text(ROWS, as_json=False) == sweep_text(ROWS)


def test_a_network_is_printed_as_lines() -> None:
    text = network_text(NETWORK)
    assert "1.25e+08 parameters between 8 peers, 4.14 bits each" in text
    assert "30.25 s" in text
    assert "75.0 %" in text


def row(name: str, **fields: Any) -> Row:
    return Row({"name": name}, result(**fields))


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    plot_rows([row("noloco"), row("diverged", eval_loss=(9e9,)), Row({}, None, "broken")], path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rows", [[], [row("everybody away", curve=())]])
def test_a_picture_without_a_curve_is_refused(tmp_path: Path, rows: list[Row]) -> None:
    with pytest.raises(BadSettings, match="nothing to draw") as caught:
        plot_rows(rows, tmp_path / "x.png")
    assert "learning_rate" in caught.value.hint
    assert not (tmp_path / "x.png").exists()


def test_results_without_a_curve_leave_the_others_their_picture(tmp_path: Path) -> None:
    plot_rows([row("noloco"), row("everybody away", curve=())], tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


def test_a_curve_that_begins_at_infinity_can_be_drawn(tmp_path: Path) -> None:
    curve = tuple(replace(point, eval_loss=math.inf) for point in CURVE)
    plot_rows([row("broken", curve=curve)], tmp_path / "x.png")
    plot_rows([row("broken", curve=curve), row("noloco")], tmp_path / "y.png")
    assert (tmp_path / "x.png").exists()
    assert (tmp_path / "y.png").exists()


def test_a_failure_to_write_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    with pytest.raises(BadSettings, match="cannot be written"):
        plot_rows([row("noloco")], tmp_path / "x.png")
