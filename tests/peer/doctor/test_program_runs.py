"""What `peer doctor` finds of a program run: what it trains, and what its tensors need."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path

import pytest

from gossamer.optim.fragments import split
from gossamer.peer.doctor.examination import NOT_COUNTED
from gossamer.peer.doctor.finding import Level
from gossamer.peer.machine.events import RunKnown
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.model.checkpoint import TENSORS
from gossamer.peer.trainer.interval import traffic_expected
from gossamer.peer.trainer.need import CHECKPOINTS, program_need
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import ProgramManifest, SignedManifest
from gossamer.run import Run
from tests.peer.doctor.cases import case, examined, invite_text
from tests.peer.doctor.test_network_checks import PLAN
from tests.peer.program_homes import program_home, program_manifest, tensors

SIZES = ("memory", "device memory", "disk", "shared memory")
NUM_VALUES = sum(tensor.numel() for tensor in tensors(0).values())


def without_shapes() -> ProgramManifest:
    values = program_manifest().model_dump()
    values["model"]["shapes"] = None
    return ProgramManifest.checked(values)


def test_it_names_the_program(tmp_path: Path) -> None:
    found = examined("run", case(program_home(tmp_path, program_manifest()).path))
    assert found.level is Level.OK
    assert "'cifar', 300 steps: a program of its members (cifar, source https://example.org/cifar, revision 1a2b3c)" in found.found


def test_a_run_that_nobody_describes_is_not_known(tmp_path: Path) -> None:
    assert "the default run" in examined("run", case(tmp_path / "home")).found
    assert "not known" in examined("run", case(tmp_path / "home", invite_text(at="/ip4/127.0.0.1/tcp/1"))).found


@pytest.mark.parametrize("manifest", [program_manifest(), without_shapes()], ids=["shapes in the manifest", "shapes in the checkpoint"])
def test_the_needs_of_its_tensors_are_counted(tmp_path: Path, manifest: ProgramManifest) -> None:
    home = program_home(tmp_path, manifest)
    for check in SIZES:
        found = examined(check, case(home.path))
        assert found.level is not Level.FAIL and ("the run needs" in found.found or check == "device memory"), found
    checkpoint = next(home.checkpoints.iterdir()) / TENSORS
    need = case(home.path).need()
    assert need is not None and need.num_params == NUM_VALUES
    assert need.disk["for checkpoints"] == CHECKPOINTS * checkpoint.stat().st_size


def test_without_shapes_and_checkpoint_it_says_why_not(tmp_path: Path) -> None:
    home = program_home(tmp_path, without_shapes(), is_trained=False)
    for check in (*SIZES, "line"):
        assert examined(check, case(home.path)) == NOT_COUNTED


def test_a_damaged_checkpoint_is_not_counted(tmp_path: Path) -> None:
    home = program_home(tmp_path, without_shapes())
    (next(home.checkpoints.iterdir()) / TENSORS).write_bytes(b"\xff" * 100)
    assert case(home.path).need() is None


def test_a_checkpoint_of_another_run_is_not_counted(tmp_path: Path) -> None:
    home = program_home(tmp_path, without_shapes())
    home.manifest.unlink()
    assert case(Home(tmp_path).path, invite_text(at="/ip4/127.0.0.1/tcp/1")).need() is not None, "the default run's"


def test_a_gpu_holds_weights_and_gradients() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors(0).items()}
    on_cpu, on_gpu = (program_need(program_manifest(), shapes, device, 0) for device in ("cpu", "cuda"))
    assert sum(on_gpu.device.values()) == sum(on_cpu.memory.values()) - sum(on_gpu.memory.values()) == 8 * NUM_VALUES
    assert not on_cpu.device and on_cpu.plan == on_gpu.plan


def test_momentum_is_counted() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors(0).items()}
    manifest = Run("a", 3, settings={"outer": {"alpha": 0.3}}).manifest(shapes)
    need = program_need(manifest, shapes, "cpu", 0)
    assert need.memory["for slow weights and momentum"] == 8 * NUM_VALUES
    assert need.plan.state_bytes == 4 * NUM_VALUES == 4 * sum(fragment.numel for fragment in split(shapes, 1 << 30))
    assert SignedManifest.sign(manifest.with_host(HOST.peer_id), HOST)


HOST = Identity(b"h" * 32)


def test_the_cost_counts_with_the_step_that_the_homes_peer_has_measured(tmp_path: Path) -> None:
    home = program_home(tmp_path, program_manifest())
    assert "of 1 s (assumed)" in examined("cost", case(home.path)).found

    measured = traffic_expected(PLAN, 4, 1e6, 0.2, is_measured=True)
    of_home = SignedManifest.from_bytes(home.manifest.read_bytes()).run_id
    for run_id, words in ((of_home, "of 0.2 s (measured)"), (bytes(32), "of 1 s (assumed)")):  # the second: of another run
        status = reduce(apply, (RunKnown(run_id.hex(), 300), measured), Status())
        home.status.write_text(json.dumps(status.to_json()))
        assert words in examined("cost", case(home.path)).found
