"""`gossamer.Run`: the manifest that a script states."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from gossamer.protocol import limits
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.layout import by_name, layout_digest
from gossamer.run import Run

SHAPES = {"head.weight": (10, 128), "a.scale": ()}


def test_a_run_states_what_its_members_share() -> None:
    run = Run("cifar", 300, "images", inner_steps=20, source="https://example.org/cifar", revision="1a2b3c", access="open")
    manifest = run.manifest(SHAPES, base="0" * 64, weights="1" * 64)
    assert (manifest.run.name, manifest.run.total_steps, manifest.run.access) == ("cifar", 300, "open")
    assert manifest.program_words == "cifar, source https://example.org/cifar, revision 1a2b3c"
    assert (manifest.program.unit, manifest.program.base, manifest.outer.inner_steps) == ("images", "0" * 64, 20)
    assert (manifest.model.layout, manifest.model.weights) == (layout_digest(by_name(SHAPES)), "1" * 64)
    assert manifest.model.shapes == SHAPES


def test_equal_scripts_make_one_run_and_any_change_another() -> None:
    runs = [Run("a", 3), Run("b", 3), Run("a", 4), Run("a", 3, "rows"), Run("a", 3, settings={"outer": {"alpha": 0.1}})]
    assert len({run.manifest(SHAPES).run_id for run in runs}) == len(runs)
    assert Run("a", 3).manifest(dict(reversed(SHAPES.items()))).run_id == Run("a", 3).manifest(SHAPES).run_id


def test_settings_reach_any_section_and_leave_other_keys_at_their_defaults() -> None:
    run = Run(
        "a", 3, settings={"outer": {"alpha": 0.3}, "codec": {"name": "int8"}, "run": {"seed": 7}, "fragments": {"max_fragment_mb": 2}}
    )
    manifest = run.manifest(SHAPES)
    assert (manifest.outer.alpha, manifest.codec.name, manifest.run.seed, manifest.fragments.max_fragment_mb) == (0.3, "int8", 7, 2.0)
    assert (manifest.outer.inner_steps, manifest.run.total_steps) == ("auto", 3)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (Run("a", 0), "run.total_steps is 0"),
        (Run("", 3), 'name is "": should be 1 to 200 printable characters'),
        (Run("a", 3, "two\nlines"), "program.unit"),
        (Run("a", 3, inner_steps="often"), 'should be "auto" or a positive whole number'),
        (Run("a", 3, access="all"), "run.access"),  # type: ignore[arg-type]
        (Run("a", 3, settings={"inner": {"optimizer": "adamw"}}), "inner is not a key of a manifest"),
        (Run("a", 3, settings={"outer": {"gama": 1.0}}), "did you mean outer.gamma?"),
        (Run("a", 3, settings={"alpha": 0.3}), "settings.alpha is 0.3, not a section"),  # type: ignore[dict-item]
        (Run("a", 3, settings={"outer": {"inner_steps": 9}}), "settings state outer.inner_steps, which Run"),
        (Run("a", 3, settings={"model": {"layout": "0" * 64}}), "settings state model.layout, which Run"),
    ],
    ids=str,
)
def test_a_run_that_cannot_be_is_refused_with_the_reason(run: Run, reason: str) -> None:
    with pytest.raises(BadManifest) as caught:
        run.manifest(SHAPES)
    assert reason in str(caught.value)
    assert caught.value.hint


def test_the_shapes_of_very_many_tensors_stay_out_of_the_manifest() -> None:
    shapes: dict[str, Any] = {f"layers.{number}.weight": (7, 7) for number in range(limits.LAYOUT_CHARS // 8)}
    manifest = Run("a", 3).manifest(shapes)
    assert manifest.model.shapes is None and manifest.model.layout == layout_digest(by_name(shapes))


def test_it_loads_nothing_heavy() -> None:
    program = "import sys, gossamer.run; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "transformers", "datasets", "hivemind", "grpc"} & set(done.stdout.split())
