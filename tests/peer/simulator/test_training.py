from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.simulator import measure, training
from peer.simulator.choices import scenario
from peer.simulator.history import Result
from peer.simulator.training import NUM_POINTS, Place, Progress, simulate
from protocol.errors import BadSettings
from tests.peer.small import small_manifest

TEXT = "".join(f"line {n} of a text that repeats itself, more or less; " for n in range(3000))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "text.txt").write_text(TEXT)
    return Place(tmp_path / "cache", tmp_path / "text.txt", "cpu", num_eval_batches=2, num_curve_batches=1)


def run(place: Place, seen: list[Progress] | None = None, **choices: Any) -> Result:
    manifest = small_manifest(data={"source": "text"})
    made = scenario(manifest, {"peers": 3, "steps": 30, "inner_steps": 5, "codec": "modulo4", **choices})
    return simulate(made, place, (seen if seen is not None else []).append)


def test_a_simulation_tells_what_it_did(place: Place) -> None:
    seen: list[Progress] = []
    result = run(place, seen)
    assert (result.method, result.codec, result.peers, result.steps) == ("noloco", "modulo4", 3, 30)
    assert result.tokens == 3 * 30 * 32 == seen[-1].num_tokens == seen[-1].total_tokens
    assert len(result.eval_loss) == 3
    assert 0.0 < result.eval_loss_averaged < 5.6
    assert max(result.eval_loss) < 5.5  # it began at log 256
    assert result.meetings > 5
    assert result.weight_std > 0.0
    assert result.virtual_steps == 30
    assert 0.0 < result.train_seconds <= result.wall_seconds


def test_the_curve_goes_from_start_to_end(place: Place) -> None:
    curve = run(place).curve
    assert len(curve) == NUM_POINTS
    assert curve[-1].tokens == 3 * 30 * 32
    assert [point.tokens for point in curve] == sorted({point.tokens for point in curve})
    assert all(point.eval_loss is not None for point in curve)
    assert curve[-1].eval_loss is not None
    assert curve[0].eval_loss is not None
    assert curve[-1].eval_loss < curve[0].eval_loss


@pytest.mark.parametrize("method", ["noloco", "local", "diloco", "ddp"])
def test_with_drop_outs_the_curve_and_the_meter_end_where_the_training_does(place: Place, method: str) -> None:
    seen: list[Progress] = []
    result = run(place, seen, method=method, codec="fp32", drop_out=0.4, speeds=(Fraction(2), Fraction(1)))
    assert result.tokens < 3 * 30 * 32 * 0.95
    assert seen[-1].num_tokens == seen[-1].total_tokens == result.tokens
    assert NUM_POINTS / 2 < len(result.curve) <= NUM_POINTS
    assert result.curve[-1].tokens == result.tokens
    assert result.curve[-1].sent_bytes == result.sent_bytes


def test_measurements_are_no_training_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def measured(*_: object) -> list[float]:
        clock.now_s += 1000.0
        return [1.0]

    monkeypatch.setattr(training, "time", clock)
    monkeypatch.setattr(measure, "losses", measured)
    monkeypatch.setattr(measure, "weight_std", lambda _: measured()[0])
    result = run(place)
    assert result.wall_seconds > NUM_POINTS * 2000.0
    assert 0.0 < result.train_seconds < 1000.0


class Clock:
    """Stands in for the module `time`, with its own time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.001
        return self.now_s


def test_equal_seeds_give_equal_results(place: Place) -> None:
    torch.manual_seed(5)
    first = run(place, drop_out=0.2)
    drawn = torch.rand(1)
    second = run(place, drop_out=0.2)
    assert (first.eval_loss, first.weight_std, first.meetings) == (second.eval_loss, second.weight_std, second.meetings)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)  # the generator is left as it was
    assert run(place, drop_out=0.2, seed=1).eval_loss != first.eval_loss


def test_one_set_of_weights_stands_for_all_peers(place: Place) -> None:
    result = run(place, method="ddp", codec="fp32")
    assert result.eval_loss == (result.eval_loss_averaged,) * 3
    assert result.weight_std == 0.0
    assert result.bits_per_param == 32.0
    assert result.meetings == 30


def test_lone_peers_send_nothing(place: Place) -> None:
    result = run(place, method="local")
    assert (result.meetings, result.bits_per_param, result.sent_bytes) == (0, 0.0, 0.0)


def test_a_text_that_is_too_small_is_refused(place: Place, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(BadSettings, match="need 51"):
        run(Place(tmp_path / "cache", tmp_path / "short.txt", "cpu"))
