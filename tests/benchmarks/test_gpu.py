"""The GPU's benchmark, at a tiny size on the CPU: what is borrowed for minutes must not fail for a typing error."""

from __future__ import annotations

import json
import time

import pytest
import torch

from benchmarks.gpu import SIZES, figures, options, plain_step, table
from benchmarks.quality import quality


def test_every_part_that_needs_no_processes_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(options().parse_args(["--device", "cpu", "--sizes", "tiny", "--seconds", "0", "--without", "tests,meetings"]))
    assert json.loads(json.dumps(found)) == found
    assert found["decode"]
    assert set(found["speed"]["tiny"]["tokens_per_second"]) == {"plain torch", "adamw", "muon", "muon, host"}
    assert all(way in table(found) for way in ("plain torch", "adamw", "muon", "of a copy"))


def test_quality_runs_to_its_end_at_a_tiny_size_and_not_without_time() -> None:
    tiny = SIZES["tiny"].manifest("muon")
    found = quality(tiny, "cpu", time.monotonic() + 600.0, most_steps=6)
    assert found is not None and json.loads(json.dumps(found)) == found
    assert found["steps"] == 6 and found["tokens"] == 6 * found["peers"] * SIZES["tiny"].step_tokens
    averaged, pairs = (found["ways"][way] for way in ("gradients averaged", "pairs"))
    assert found["gap"] == pytest.approx(pairs["loss"] / averaged["loss"] - 1.0)
    assert 0.0 < pairs["mb_sent_per_peer"] < averaged["mb_sent_per_peer"] / 5
    assert quality(tiny, "cpu", time.monotonic()) is None


@pytest.mark.parametrize(("name", "millions"), [("100M", 99), ("125M", 125), ("350M", 350), ("1.2B", 1200)])
def test_the_sizes_are_what_they_are_called(name: str, millions: int) -> None:
    from gossamer.peer.model.model import parameter_shapes

    shapes = parameter_shapes(SIZES[name].manifest("adamw").model)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == pytest.approx(1e6 * millions, rel=0.08)


def test_the_plain_loop_learns() -> None:
    step = plain_step(SIZES["tiny"], torch.device("cpu"))
    for _ in range(2):
        step()
