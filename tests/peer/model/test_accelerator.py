"""Which device a setting names, and what is done on each without a look at its kind. A GPU's part: tests/device."""

from __future__ import annotations

import os

import pytest
import torch

from gossamer.optim.codecs import codec
from gossamer.peer.model import accelerator
from gossamer.peer.model.accelerator import behind, choose_device, choose_devices, finish, forked_generators, has_own_memory, mark
from gossamer.protocol.errors import BadSettings

CPU = torch.device("cpu")


def test_a_device_comes_with_its_reason() -> None:
    assert choose_device("cpu") == (torch.device("cpu"), "as asked")
    device, reason = choose_device("auto")
    assert reason == ("no GPU was found" if device.type == "cpu" else f"a GPU was found: {device.type}")
    for name in ("gpu:999", "cuda:999", "xpu:999"):
        with pytest.raises(BadSettings, match="no device|needs a GPU"):
            choose_device(name)


def test_what_names_no_device_is_refused_beside_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert choose_device("gpu:1")[0] == choose_device("cuda:1")[0] == torch.device("cuda", 1)
    for name in ("gpus", "cuda:2", "cuda:x", "cuda:", "xpu", "cpu:0"):
        with pytest.raises(BadSettings, match=f"no device {name}"):
            choose_device(name)


def test_several_devices_come_by_number_or_as_so_many_processes() -> None:
    assert choose_devices("cpu:1") == ((torch.device("cpu"),), "as asked")
    assert choose_devices("cpu")[0] == (torch.device("cpu"),)
    with pytest.raises(BadSettings, match="'cpu:99' needs 99 processor cores") as caught:
        choose_devices("cpu:99")
    assert caught.value.hint == f"choose cpu:{os.cpu_count()}"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("names", ["all", "gpu", "gpu:1", "cuda", "cuda:1", "0", "0,1"])
def test_gpus_of_a_machine_without_any(names: str) -> None:
    with pytest.raises(BadSettings, match=f"'{names}' needs a GPU"):
        choose_devices(names)


def test_memory_of_their_own_have_all_but_those_that_compute_in_the_hosts() -> None:
    assert [kind for kind in ("cpu", "cuda", "mps", "xpu") if has_own_memory(kind)] == ["cuda", "xpu"]


def test_on_the_cpu_nothing_is_to_be_waited_for() -> None:
    assert mark(CPU) is None
    finish(CPU)
    with behind(None, None):
        pass


def test_generators_are_as_before() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with forked_generators(CPU):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_that_computes_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(*arguments: object) -> str:
        raise ArithmeticError("torch 2.0 computes other bits on gpu:0 than on the CPU")

    monkeypatch.setattr(accelerator, "settle_coding", settle)
    with pytest.raises(BadSettings, match="the device or its driver is broken") as refused:
        accelerator.try_coding(codec("modulo4"), torch.device("cpu"))
    assert "--devices cpu" in str(refused.value.hint)
