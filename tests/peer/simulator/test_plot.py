from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from peer.simulator.plot import need_plot, plot
from protocol.errors import BadSettings
from tests.peer.simulator.results import result


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    need_plot(path)
    plot({"noloco": result(), "diverged": result(eval_loss=(9e9,))}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


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
