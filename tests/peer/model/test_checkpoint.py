from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from peer.model.checkpoint import HEADER, TENSORS, CheckpointContents, load_latest, save
from protocol.errors import BadSettings

RUN, OTHER_RUN = b"r" * 32, b"o" * 32

SAVE_IN_LITTLE_SPACE = """
import resource, sys
from pathlib import Path
import torch
from peer.model.checkpoint import CheckpointContents, save
from protocol.errors import BadSettings
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    save(Path(sys.argv[1]), CheckpointContents(b"r" * 32, 3, {"x": torch.zeros(int(sys.argv[3]))}, {"long": "x" * 100_000}))
except BadSettings as error:
    print(error, "|", error.hint)
"""

SAVE_UNTIL_KILLED = """
import itertools, sys
from pathlib import Path
import torch
from peer.model.checkpoint import CheckpointContents, save
torch.set_num_threads(1)
for step in itertools.count(1):
    save(Path(sys.argv[1]), CheckpointContents(b"r" * 32, step, {"x": torch.full((300_000,), float(step))}, {"step": step}))
    print(step, flush=True)
"""


def contents(step: int, run_id: bytes = RUN) -> CheckpointContents:
    generator = torch.Generator().manual_seed(step)
    tensors = {"slow/0": torch.randn(50, generator=generator), "rng": torch.get_rng_state(), "inner/step/w": torch.tensor(float(step))}
    return CheckpointContents(run_id, step, tensors, {"clock_steps": step, "applied": ["ab"], "corpus": {}})


def assert_is(loaded: CheckpointContents, step: int) -> None:
    expected = contents(step)
    assert (loaded.run_id, loaded.step, loaded.state) == (expected.run_id, step, expected.state)
    assert loaded.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in expected.tensors.items() if name != "rng")


def loaded_step(folder: Path) -> int:
    loaded = load_latest(folder, RUN)
    assert loaded is not None
    assert_is(loaded.contents, loaded.contents.step)
    return loaded.contents.step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", contents(800))
    assert path.name == "step-00000800"
    loaded = load_latest(tmp_path / "checkpoints", RUN)
    assert loaded is not None
    assert loaded.path == path
    assert loaded.rejected == ()
    assert_is(loaded.contents, 800)
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_nothing_saved_is_nothing_loaded(tmp_path: Path) -> None:
    assert load_latest(tmp_path, RUN) is None
    assert load_latest(tmp_path / "missing", RUN) is None


def test_a_loaded_checkpoint_is_the_callers_own(tmp_path: Path) -> None:
    save(tmp_path, contents(1))
    loaded = load_latest(tmp_path, RUN)
    assert loaded is not None
    loaded.contents.tensors["slow/0"].zero_()
    assert loaded_step(tmp_path) == 1


def test_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 99_999_998, 99_999_999, 100_000_000):
        save(tmp_path, contents(step))
    assert names(tmp_path) == ["step-100000000", "step-99999999"]
    assert loaded_step(tmp_path) == 100_000_000


def test_a_second_one_of_the_same_step_wins(tmp_path: Path) -> None:
    for _ in range(12):
        path = save(tmp_path, contents(5))
    assert path.name == "step-00000005.11"
    assert names(tmp_path) == ["step-00000005.10", "step-00000005.11"]
    loaded = load_latest(tmp_path, RUN)
    assert loaded is not None
    assert loaded.path == path


def test_a_given_up_future_does_not_come_back(tmp_path: Path) -> None:
    save(tmp_path, contents(100))
    damaged = save(tmp_path, contents(200))
    (damaged / TENSORS).write_bytes(b"")
    assert loaded_step(tmp_path) == 100
    save(tmp_path, contents(150))
    assert names(tmp_path) == ["step-00000100", "step-00000150"]


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, contents(1, OTHER_RUN))
    with pytest.raises(BadSettings, match=OTHER_RUN.hex()[:12]) as caught:
        load_latest(tmp_path, RUN)
    assert "--home" in caught.value.hint


@pytest.mark.parametrize("file", [TENSORS, HEADER])
def test_any_damage_falls_back_to_the_one_before(tmp_path: Path, file: str) -> None:
    save(tmp_path, contents(1))
    path = save(tmp_path, contents(2)) / file
    whole = path.read_bytes()
    chance = random.Random(0)
    for _ in range(60):
        position = chance.randrange(len(whole))
        flipped = whole[:position] + bytes([whole[position] ^ (1 << chance.randrange(8))]) + whole[position + 1 :]
        for damaged in (flipped, whole[:position], whole + b"x"):
            path.write_bytes(damaged)
            loaded = load_latest(tmp_path, RUN)
            assert loaded is not None
            assert_is(loaded.contents, 1)
            assert [(rejected.name, file in reason) for rejected, reason in loaded.rejected] == [("step-00000002", True)]
    path.write_bytes(whole)
    assert loaded_step(tmp_path) == 2


@pytest.mark.parametrize("file", [TENSORS, HEADER])
def test_a_missing_file_is_damage(tmp_path: Path, file: str) -> None:
    save(tmp_path, contents(1))
    (save(tmp_path, contents(2)) / file).unlink()
    assert loaded_step(tmp_path) == 1


def test_if_all_are_damaged_training_does_not_silently_start_over(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, contents(step)) / TENSORS).write_bytes(b"")
    with pytest.raises(BadSettings, match=r"step-00000002: .*step-00000001: ") as caught:
        load_latest(tmp_path, RUN)
    assert "move" in caught.value.hint


@pytest.mark.parametrize(
    ("limit_bytes", "num_values"), [(0, 100_000), (399_000, 100_000), (5000, 10)], ids=["at once", "tensors", "header"]
)
def test_a_disk_that_refuses_leaves_the_earlier_ones_untouched(tmp_path: Path, limit_bytes: int, num_values: int) -> None:
    """A limit on the size of files fails writes as a full disk does."""
    for step in (1, 2):
        save(tmp_path, contents(step))
    arguments = [sys.executable, "-c", SAVE_IN_LITTLE_SPACE, str(tmp_path), str(limit_bytes), str(num_values)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert "could not be written" in result.stdout
    assert "earlier checkpoints are untouched" in result.stdout
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert loaded_step(tmp_path) == 2


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadSettings, match="could not be written"):
        save(tmp_path / "file", contents(1))


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(0)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    last = 0
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE_UNTIL_KILLED, str(tmp_path / "checkpoints")], stdout=subprocess.PIPE, env=environment
        ) as writer:
            assert writer.stdout is not None
            for _ in range(chance.randrange(2, 12)):
                last = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
        loaded = load_latest(tmp_path / "checkpoints", RUN)
        assert loaded is not None
        assert loaded.rejected == ()
        assert loaded.contents.step >= last
        assert loaded.contents.tensors["x"].eq(loaded.contents.step).all()


def test_the_rest_of_a_killed_save_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".writing-step-00000001").mkdir()
    (tmp_path / ".writing-step-00000001" / TENSORS).touch()
    assert load_latest(tmp_path, RUN) is None
    save(tmp_path, contents(1))
    assert names(tmp_path) == ["step-00000001"]
