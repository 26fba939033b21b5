"""Whether a stage is worth holding on this machine, as `peer doctor` says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.peer.doctor.case import Case
from gossamer.peer.doctor.examination import CHECKS
from gossamer.peer.doctor.finding import Finding, Level
from gossamer.peer.doctor.machine_checks import RATE, UP, compute_in_child, device_rate
from gossamer.peer.doctor.visit import CallRound
from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.home import Home
from gossamer.protocol.run.manifest import Manifest
from tests.peer.doctor.cases import case, examined

MBIT = 125_000.0
LARGE: dict[str, Any] = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 256, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 256, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


def staged(config: dict[str, Any], count: int, **inner: int) -> Manifest:
    tables = {"model": {"config": config}, "stages": {"count": count}, "inner": inner, "fragments": {"max_fragment_mb": 200.0}}
    return Manifest.checked(tables)


LARGE_RUN = staged(LARGE, 3)


def found(
    folder: Path, manifest: Manifest, flops: float, rates: tuple[float, float] | None, check: str = "device use", **given: Any
) -> Finding:
    """Return the finding for a device of so many operations a second in matrix products, on a line of these rates."""
    examinee = Case(Home(folder), None, LocalSettings(devices="cpu", **given), None, manifest)
    examinee.computed = lambda: (0, f"{UP}\n{RATE}{flops}\ncpu computes right")
    examinee.visit = lambda: CallRound(line=rates)
    return CHECKS[check](examinee)


def test_a_run_without_stages_has_nothing_to_say(tmp_path: Path) -> None:
    finding = examined("device use", case(tmp_path))
    assert finding.level is Level.SKIP and "no stages" in finding.found


def test_a_model_that_fits_whole_is_advised_against(tmp_path: Path) -> None:
    finding = found(tmp_path, staged(SMALL, 3), 1e9, (1e9, 1e9))
    assert finding.level is Level.WARN and finding.found.startswith("do not: the whole model fits this machine")
    assert "[stages]" in finding.way_out


def test_a_line_that_feeds_little_of_the_device_is_advised_against(tmp_path: Path) -> None:
    """1.7 B parameters a stage, two sends of 8448 bytes; an H100 at 40 % of 989 TFLOP/s computes some 29,000 tokens a second."""
    finding = found(tmp_path, LARGE_RUN, 989e12, (20 * MBIT, 50 * MBIT))
    assert finding.level is Level.WARN and finding.found.startswith("do not: stage 1 of 3 computes")
    assert "this line feeds 1 % of the device" in finding.found and "--least-use 0" in finding.way_out
    allowed = found(tmp_path, LARGE_RUN, 989e12, (20 * MBIT, 50 * MBIT), least_use=0)
    assert allowed.level is Level.OK


def test_each_kind_of_stage_is_told_with_its_bytes(tmp_path: Path) -> None:
    finding = found(tmp_path, LARGE_RUN, 2.5e11, (100 * MBIT, 100 * MBIT))
    assert finding.level is Level.OK
    assert all(name in finding.found for name in ("stage 1 of 3", "stage 2 of 3", "stage 3 of 3"))
    assert finding.found.count("this line feeds 100 % of the device") == 3


def test_the_stage_of_the_home_is_told_alone(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    home.stage.write_text("2\n")
    examinee = Case(home, None, LocalSettings(devices="cpu"), None)
    examinee.manifest = lambda: staged(SMALL, 3)  # type: ignore[method-assign]
    assert [stage.name for stage in examinee.stages()] == ["stage 2 of 3"]


def test_a_line_that_is_not_measured_is_said(tmp_path: Path) -> None:
    finding = found(tmp_path, LARGE_RUN, 2.5e11, None)
    assert "which takes" in finding.found and finding.found.endswith("the line is not measured") and "feeds" not in finding.found


def test_the_cost_counts_the_hops_of_the_busiest_stage(tmp_path: Path) -> None:
    finding = found(tmp_path, LARGE_RUN, 2.5e11, (100 * MBIT, 100 * MBIT), check="cost")
    assert "of it by micro-batches, the rest by meetings" in finding.found


@pytest.mark.parametrize("output", ["", f"{UP}\n", f"{UP}\nnothing"])
def test_a_device_that_has_not_computed_has_no_rate(output: str) -> None:
    assert device_rate(output) == 0.0


def test_the_rate_of_this_machine_is_measured() -> None:
    code, output = compute_in_child("cpu")
    assert code == 0 and 1e8 < device_rate(output) < 1e15
    assert "computes right on it" in output.strip().splitlines()[-1]
