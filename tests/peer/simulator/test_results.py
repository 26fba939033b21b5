from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from gossamer.peer.simulator.results import JSON_KEYS, Row, need_plot, plot_rows, value_text
from gossamer.protocol.errors import BadSettings
from tests.peer.simulator.results import CURVE, result


def row(name: str, **fields: Any) -> Row:
    return Row({"name": name}, result(**fields))


def test_the_json_has_the_keys_of_the_contract() -> None:
    assert list(result().to_json()) == list(JSON_KEYS)
    assert JSON_KEYS[:4] == ("method", "codec", "peers", "steps")


def test_the_mean_of_the_peers() -> None:
    assert result(eval_loss=(2.0, 3.0)).eval_loss_mean == 2.5


def test_a_row_is_named_by_its_point() -> None:
    assert Row({"learning_rate": 1e-3, "codec": "nf4"}, None).name == "learning_rate 0.001, codec nf4"
    assert Row({}, result(method="diloco")).name == "diloco"


@pytest.mark.parametrize(
    ("value", "text"), [((Fraction(4), Fraction(1, 2)), "4:1/2"), (True, "true"), (5, "5"), (0.25, "0.25"), ("nf4", "nf4")]
)
def test_values_are_written_as_people_write_them(value: object, text: str) -> None:
    assert value_text(value) == text


# ---------------------------------------------------------------------- as a picture


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    need_plot(path)
    plot_rows([row("noloco"), row("diverged", eval_loss=(9e9,)), Row({}, None, "broken")], path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rows", [[], [row("everybody away", curve=())]])
def test_where_nothing_can_be_drawn_it_says_so(tmp_path: Path, rows: list[Row]) -> None:
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


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadSettings, match="matplotlib") as caught:
        need_plot(tmp_path / "x.png")
    assert "gossamer-peer[plot]" in caught.value.hint


@pytest.mark.parametrize("name", ["no-such-folder/x.png", "x.jpeg", "x"])
def test_a_picture_that_cannot_be_written_is_refused_before_training(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadSettings):
        need_plot(tmp_path / name)


def test_a_failure_to_write_is_the_operators(tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    with pytest.raises(BadSettings, match="cannot be written"):
        plot_rows([row("noloco")], tmp_path / "x.png")
