"""The GPU's benchmark, at a tiny size on the CPU: what is borrowed for minutes must not fail for a typing error."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpu import SIZES, figures, options, plain_step, table


def test_every_part_that_needs_no_processes_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(options().parse_args(["--device", "cpu", "--sizes", "tiny", "--seconds", "0", "--without", "tests,meetings"]))
    assert json.loads(json.dumps(found)) == found
    assert found["decode"]
    assert set(found["speed"]["tiny"]["tokens_per_second"]) == {"plain torch", "adamw", "muon"}
    assert all(way in table(found) for way in ("plain torch", "adamw", "muon", "of a copy"))


@pytest.mark.parametrize(("name", "millions"), [("125M", 125), ("350M", 350), ("1.2B", 1200)])
def test_the_sizes_are_what_they_are_called(name: str, millions: int) -> None:
    from peer.model.model import parameter_shapes

    shapes = parameter_shapes(SIZES[name].manifest("adamw").model)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == pytest.approx(1e6 * millions, rel=0.08)


def test_the_plain_loop_learns() -> None:
    step = plain_step(SIZES["tiny"], torch.device("cpu"))
    for _ in range(2):
        step()
