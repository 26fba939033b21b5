from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gossamer.peer.model import checkpoint
from gossamer.peer.model.checkpoint import DTYPES, HEADER, TENSORS, CheckpointContents, load_latest, save, write_tensors
from gossamer.protocol.errors import BadSettings
from tests.full_disk import room_for

RUN, OTHER_RUN = b"r" * 32, b"o" * 32

SAVE_UNTIL_KILLED = """
import itertools, os, signal, sys
from pathlib import Path
import torch
from gossamer.peer.model.checkpoint import CheckpointContents, save
torch.set_num_threads(1)
for line in sys.stdin:
    results, mine = os.pipe()
    child = os.fork()
    if not child:
        for step in itertools.count(1):
            save(Path(sys.argv[1]), CheckpointContents(b"r" * 32, step, {"x": torch.full((300_000,), float(step))}, {"step": step}))
            os.write(mine, b"s")
    saved = sum(len(os.read(results, 1)) for _ in range(int(line)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(saved, flush=True)
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


def test_a_saved_checkpoint_loads(tmp_path: Path) -> None:
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
def test_any_damage_falls_back_to_the_earlier_checkpoint(tmp_path: Path, file: str) -> None:
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


def test_a_checkpoint_of_another_release_falls_back_to_the_earlier_one_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, contents(1))
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
        save(tmp_path, contents(2))
    loaded = load_latest(tmp_path, RUN)
    assert loaded is not None and loaded.contents.step == 1
    assert [reason for _, reason in loaded.rejected] == ["it has format 2, this build reads 1"]


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
    for step in (1, 2):
        save(tmp_path, contents(step))
    large = CheckpointContents(RUN, 3, {"x": torch.zeros(num_values)}, {"long": "x" * 100_000})
    with room_for(limit_bytes), pytest.raises(BadSettings, match="could not be written") as caught:
        save(tmp_path, large)
    assert "earlier checkpoints are untouched" in caught.value.hint
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert loaded_step(tmp_path) == 2


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_the_name_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, contents(step))
    sync, synced = os.fsync, list[tuple[str, bool, bool]]()

    def noted(descriptor: int) -> None:
        sync(descriptor)
        is_there = [(tmp_path / f"step-0000000{step}").exists() for step in (1, 3)]
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, is_there[0], is_there[1]))

    monkeypatch.setattr(os, "fsync", noted)
    save(tmp_path, contents(3))
    assert synced[-1] == (tmp_path.name, True, True)
    assert set(synced[:-1]) == {(name, True, False) for name in (TENSORS, HEADER, ".writing-step-00000003")}


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadSettings, match="could not be written"):
        save(tmp_path / "file", contents(1))


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(0)
    program = [sys.executable, "-c", SAVE_UNTIL_KILLED, str(tmp_path / "checkpoints")]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        for _ in range(4):
            writer.stdin.write(f"{chance.randrange(2, 12)}\n")
            writer.stdin.flush()
            last = int(writer.stdout.readline())
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


def sample() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{dtype}": torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype in DTYPES}
    tensors["odd"] = torch.arange(7, dtype=torch.uint8)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["transposed"] = torch.arange(6.0).view(2, 3).t()
    tensors["learning"] = torch.nn.Parameter(torch.tensor([float("nan"), float("inf"), -0.0]))
    return tensors


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    written = sample()
    digest = write_tensors(tmp_path / "file", written)
    assert hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest() == digest
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == written.keys()
    for name, tensor in written.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert raw(loaded[name]) == raw(tensor)


def test_large_tensors_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 1000)
    tensor = torch.randn(12345)
    write_tensors(tmp_path / "file", {"x": tensor})
    assert load_file(tmp_path / "file")["x"].equal(tensor)


def test_one_tensor_can_be_read_alone(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", sample())
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.get_tensor("odd").tolist() == list(range(7))


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "file", sample())
    assert (tmp_path / "file").read_text() == "mine"
