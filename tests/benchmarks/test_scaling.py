from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.scaling import METHODS, Line, Runs, rows, steps_alone, steps_to, table
from gossamer.peer.simulator.choices import scenario, setting
from gossamer.peer.simulator.training import simulate
from gossamer.protocol.run.manifest import Manifest

TINY = {"method": "noloco", "peers": "2", "steps": "2", "batch_size": "1", "seed": "0"}


def test_steps_to_a_loss_are_interpolated_and_infinite_if_it_is_never_reached() -> None:
    curve = [(10.0, 3.0), (20.0, 2.0), (30.0, 2.5)]
    assert steps_to(2.5, curve) == 15.0
    assert steps_to(3.5, curve) == 10.0
    assert steps_to(1.9, curve) == math.inf and steps_to(1.9, []) == math.inf


def test_steps_of_one_peer_are_interpolated_in_their_logarithm() -> None:
    alone = [(400, 2.0), (100, 3.0)]
    assert steps_alone(2.5, alone) == pytest.approx(200.0)
    assert steps_alone(3.0, alone) == 100.0
    assert math.isnan(steps_alone(1.9, alone))


def test_the_table_shows_the_speed_up_over_one_peer_and_the_gain_of_a_doubling() -> None:
    lines = [Line(1, "0.01", (3.0, 3.0), math.inf, 0.0), Line(4, "0.02", (2.4, 2.6), 80.0, 12.0)]
    _, one, four = table("pairs", lines, [(100, 3.0), (400, 2.0)], 100)
    assert one.split() == ["1", "peers", "0.01", "3.0000", "0.0000", "-", "0.0", "1.00", "-"]
    assert four.split() == ["4", "peers", "0.02", "2.5000", "0.1000", "80", "12.0", "2.00", "0.250"]


def test_every_row_can_be_simulated_and_groups_exchange_as_often_as_pairs_meet() -> None:
    found = dict(rows(Namespace(methods=list(METHODS), every=[5, 10])))
    assert found["local-sgd, every 10"]["inner_steps"] == "7" and found["pairs, every 10"]["inner_steps"] == "10"
    assert "ddp" in found and len(found) == 7
    for settings in found.values():
        scenario(Manifest(), dict(setting(f"{name}={text}") for name, text in settings.items()))


def test_a_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "EVAL_BATCHES", 1)
    monkeypatch.setattr(scaling, "CURVE_BATCHES", 1)
    kept, started = tmp_path / "runs.jsonl", []
    monkeypatch.setattr(scaling, "simulate", lambda *given: started.append(given) or simulate(*given))
    first = Runs(kept, None).outcome(TINY)
    kept.write_text(kept.read_text() + '\n{"run": "interrup')
    second = Runs(kept, None).outcome(TINY)
    assert len(started) == 1 and second.loss == first.loss
    assert [steps for steps, _ in first.curve] == [1.0, 2.0]
    assert Runs(kept, None).outcome({**TINY, "seed": "1"}).loss != first.loss and len(started) == 2
    Runs(kept, None).outcome({**TINY, "seed": "1"})
    assert len(started) == 2


def test_a_run_on_another_text_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "EVAL_BATCHES", 1)
    monkeypatch.setattr(scaling, "CURVE_BATCHES", 1)
    kept, losses = tmp_path / "runs.jsonl", []
    for number, words in enumerate(("to be or not to be, ", "that is the question; ")):
        text = tmp_path / f"{number}.txt"
        text.write_text(words * 2000)
        losses.append(Runs(kept, text).outcome(TINY).loss)
        text.rename(tmp_path / "moved.txt")
        assert Runs(kept, tmp_path / "moved.txt").outcome(TINY).loss == losses[-1]
    assert losses[0] != losses[1]
    assert sum(bool(line) for line in kept.read_text().splitlines()) == 2
