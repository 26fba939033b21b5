from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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
