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


SEEDS = [
    Row({"codec": "nf4", "seed": 1}, result(eval_loss=(2.0, 2.0), eval_loss_averaged=2.0)),
    Row({"codec": "nf4", "seed": 2}, result(eval_loss=(2.5, 2.5), eval_loss_averaged=3.0)),
    Row({"codec": "fp32", "seed": 1}, result(eval_loss=(1.0, 1.0), eval_loss_averaged=1.0)),
    Row({"codec": "fp32", "seed": 2}, None, "diverged"),
    Row({"codec": "q2", "seed": 1}, None, "diverged"),
]


def test_the_seeds_of_a_sweep_are_averaged_with_their_spread() -> None:
    table = rows_text(SEEDS, as_json=False).split("over the seeds: mean +- standard deviation\n")[1]
    lines = [line.split("  ") for line in table.splitlines()]
    assert [[cell.strip() for cell in line if cell.strip()] for line in lines[1:]] == [
        ["fp32", "1 (1 diverged)", "1.0000 +- 0.0000", "1.0000 +- 0.0000"],
        ["nf4", "2", "2.2500 +- 0.3536", "2.5000 +- 0.7071"],
        ["q2", "0 (1 diverged)", "diverged", "diverged"],
    ]
    averages = json.loads(rows_text(SEEDS, as_json=True))["averages"]
    assert averages[0] == {
        "settings": {"codec": "nf4"}, "seeds": 2, "diverged": 0, "eval_loss_mean": 2.25, "eval_loss_averaged": 2.5,
        "eval_loss_mean_std": pytest.approx(0.35355, abs=1e-4), "eval_loss_averaged_std": pytest.approx(0.70711, abs=1e-4),
    }  # fmt: skip
    assert averages[2]["eval_loss_mean"] is None


def test_a_sweep_without_seeds_has_no_averages() -> None:
    assert "over the seeds" not in rows_text(ROWS, as_json=False)
    assert "averages" not in json.loads(rows_text(ROWS, as_json=True))


def test_the_picture_draws_one_line_with_a_band_for_the_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr("gossamer.cli.simulation_report.save_figure", lambda figure, path: drawn.append(figure))
    rows = [Row(row.point, replace(row.result, curve=CURVE)) for row in SEEDS if row.result]
    plot_rows(rows, tmp_path / "curves.png")
    axes = drawn[0].axes[0]
    assert [line.get_label() for line in axes.get_lines()] == ["codec nf4", "codec fp32"]
    assert len(axes.collections) == 1
