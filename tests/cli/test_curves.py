from __future__ import annotations

import math
from pathlib import Path

import pytest

from gossamer.cli.curves import curves, draw_curves, need_plot
from gossamer.peer.machine.event_log import EventLog
from gossamer.peer.machine.events import EvalDone, StepDone
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings


def ran(folder: Path) -> Path:
    home = Home(folder)
    home.create()
    log = EventLog(home.events)
    for step, loss in ((1, 5.0), (2, math.nan), (3, 4.0)):
        log.append(StepDone(step, step, step, loss, 0.1, 1.0, 1.0, 0.0, 1.0, 0.0))
    log.append(EvalDone(3, 4.5, 8))
    return home.path


def test_curves_come_from_the_event_log(tmp_path: Path) -> None:
    training, held_out = curves(ran(tmp_path))
    assert [step for step, _ in training] == [1, 3]
    assert training[0][1] == 5.0
    assert 4.0 < training[1][1] < 5.0
    assert held_out == [(3, 4.5)]


def test_one_picture_shows_the_curves_of_all_peers(tmp_path: Path) -> None:
    homes = {"peer-1": ran(tmp_path / "1"), "alone": ran(tmp_path / "2"), "never": tmp_path / "3"}
    draw_curves(homes, "alone", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_failure_to_write_a_picture_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadSettings) as caught:
        draw_curves({"alone": ran(tmp_path)}, "alone", tmp_path / "nowhere" / "loss.png")
    assert caught.value.hint


@pytest.mark.parametrize("name", ["no-such-folder/x.png", "x.jpeg", "x"])
def test_a_picture_that_cannot_be_written_is_refused_before_training(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadSettings):
        need_plot(tmp_path / name)
