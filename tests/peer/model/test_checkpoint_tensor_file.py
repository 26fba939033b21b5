from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from peer.model import checkpoint as tensor_file
from peer.model.checkpoint import DTYPES, write_tensors


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
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 1000)
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
