from __future__ import annotations

import _ctypes
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from gossamer.optim import compiled
from gossamer.optim.compiled import F32, coded_with, coding_words, lack_for_triton, load
from tests.optim.codings import FORMS

NAME = "_compiled.abi3.so"


def test_a_folder_without_it_says_how_to_get_it(tmp_path: Path) -> None:
    assert load(tmp_path) == (None, "no compiled part here; `pip install` with a C compiler builds it")


def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    shutil.copy(_ctypes.__file__, tmp_path / NAME)
    part, reason = load(tmp_path)
    assert part is None
    assert "another version" in reason


def test_a_file_that_is_no_library_is_not_used(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("compiled for another machine")
    part, reason = load(tmp_path)
    assert part is None
    assert "cannot be used" in reason
    assert "C compiler" in reason


def test_words_name_what_codes() -> None:
    cpu, by_name = torch.device("cpu"), "compiled" if "compiled" in FORMS else "torch"
    assert coding_words(cpu).split()[0] == by_name
    lack = lack_for_triton(torch.device("cuda:0"))
    assert coding_words(torch.device("cuda:0")) == (f"torch (on cuda: {lack})" if lack else "triton")
    assert coding_words(torch.device("mps")) == "torch (on mps)"
    with coded_with(None):
        assert coding_words(cpu).startswith("torch (")
    assert coding_words(cpu).split()[0] == by_name


def test_what_triton_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    assert lack_for_triton(cuda) == "triton is not installed"
    monkeypatch.setattr(compiled, "find_spec", lambda name: name)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    assert lack_for_triton(cuda) == "no headers of Python for triton here"
    (tmp_path / "Python.h").touch()
    assert lack_for_triton(cuda) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1) if device == cuda else (9, 0))
    assert "compute capability 7.0" in lack_for_triton(cuda)
    assert lack_for_triton(torch.device("cuda:0")) == ""
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lack_for_triton(torch.device("cuda:0")) == "no C compiler for triton here"


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2], torch.zeros(4, device="meta")], ids=["dtype", "strides", "device"]
)
def test_only_what_c_may_read_is_passed_on(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="contiguous"):
        F32.from_param(tensor)
