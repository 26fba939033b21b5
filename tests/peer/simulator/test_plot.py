from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest

from peer.simulator.history import Result
from peer.simulator.plot import need_plot, plot
from protocol.errors import BadSettings
from tests.peer.simulator.results import CURVE, result


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    need_plot(path)
    plot({"noloco": result(), "diverged": result(eval_loss=(9e9,))}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("results", [{}, {"everybody away": result(curve=())}])
def test_where_nothing_can_be_drawn_it_says_so(tmp_path: Path, results: dict[str, Result]) -> None:
    with pytest.raises(BadSettings, match="nothing to draw") as caught:
        plot(results, tmp_path / "x.png")
    assert "learning_rate" in caught.value.hint
    assert not (tmp_path / "x.png").exists()


def test_results_without_a_curve_leave_the_others_their_picture(tmp_path: Path) -> None:
    plot({"noloco": result(), "everybody away": result(curve=())}, tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


def test_a_curve_that_begins_at_infinity_can_be_drawn(tmp_path: Path) -> None:
    curve = tuple(replace(point, eval_loss=math.inf) for point in CURVE)
    plot({"broken": result(curve=curve)}, tmp_path / "x.png")
    plot({"broken": result(curve=curve), "noloco": result()}, tmp_path / "y.png")
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
        plot({"noloco": result()}, tmp_path / "x.png")
