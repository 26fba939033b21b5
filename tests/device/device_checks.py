"""That the device made in Python refuses what a GPU refuses, counts what makes the host wait, and is late where it may be.

Run in a process of its own by test_on_python_device.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.device.python_device import NAME, Synchronized, Unordered, no_synchronization, synchronizations


def values(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape).to(NAME)


MIXTURES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda here, there: there + here,
    "add in place": lambda here, there: there.add_(here),
    "onto the host in place": lambda here, there: here.add_(there),
    "products": lambda here, there: there @ here,
    "cat": lambda here, there: torch.cat((here, there)),
    "where": lambda here, there: torch.where(there > 0, there, here),
    "output": lambda here, there: torch.mul(there, 2.0, out=here),
    "index": lambda here, there: there[here[0].long() % 2],
    "lerp": lambda here, there: there.lerp_(here, 0.5),
}


@pytest.mark.parametrize("operation", MIXTURES.values(), ids=MIXTURES)
def test_it_refuses_a_mixture_of_devices(operation: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match=r"device|got tensors on"):
        operation(torch.ones(3, 3), values(3, 3))


def test_it_takes_scalars_of_the_host_and_copies_between_devices() -> None:
    there, here = values(3), torch.empty(3)
    assert (there * torch.tensor(2.0)).device.type == NAME
    assert torch.equal(here.copy_(there + 1.0), torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(there.copy_(here).cpu(), here)


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0, 0]),
    "bool": lambda x: bool((x > 2.0).all()),
    "tolist": lambda x: x.tolist(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: (x > 2.0).nonzero(),
    "mask as index": lambda x: x[x > 2.0],
    "unique": lambda x: x.unique(),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: torch.ones(3).to(x.device),
    "new from the host's values": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "into pageable memory, not blocking": lambda x: torch.empty(3, 4).copy_(x, non_blocking=True),
    "event": lambda x: torch.accelerator.current_stream(x.device).record_event().synchronize(),
    "stream": lambda x: torch.accelerator.current_stream(x.device).synchronize(),
    "device": lambda x: torch.accelerator.synchronize(x.device),
}


@pytest.mark.parametrize("operation", WAITS.values(), ids=WAITS)
def test_it_reports_what_waits_for_it(operation: Callable[[Tensor], object]) -> None:
    x = values(3, 4)
    with synchronizations() as found:
        operation(x)
    assert found and "device_checks.py" in found[0], "with the place"
    with no_synchronization(), pytest.raises(Synchronized):
        operation(x)


FREE: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x @ x.T).relu().norm(),
    "views": lambda x: x.T.contiguous().view(2, 6)[1].expand(3, 6).clone(),
    "fill by mask": lambda x: x.masked_fill_(x > 5.0, 0.0),
    "assign by mask": lambda x: x.__setitem__(x > 5.0, 0.0),
    "new": lambda x: torch.zeros(3, device=x.device),
    "clip": lambda x: torch.nn.utils.clip_grad_norm_([x], 1.0),
    "from pinned memory, not blocking": lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True),
    "to pinned memory, not blocking": lambda x: torch.empty(3, 4, pin_memory=True).copy_(x, non_blocking=True),
    "an event behind another stream": lambda x: torch.Stream(x.device).wait_event(
        torch.accelerator.current_stream(x.device).record_event()
    ),
}


@pytest.mark.parametrize("operation", FREE.values(), ids=FREE)
def test_it_reports_nothing_else(operation: Callable[[Tensor], object]) -> None:
    x = values(3, 4)
    with no_synchronization():
        operation(x)


def test_a_copy_that_does_not_block_comes_late() -> None:
    x, host = values(5), torch.empty(5, pin_memory=True)
    early = torch.accelerator.current_stream(x.device).record_event()
    host.copy_(x, non_blocking=True)
    event = torch.accelerator.current_stream(x.device).record_event()
    early.synchronize()
    assert host.isnan().all(), "this event was before the copy"
    x.zero_()
    event.synchronize()
    assert host.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0], "in the order of the stream"


def test_streams_need_an_order() -> None:
    x, side = values(4), torch.Stream(NAME)
    x.mul_(2.0)
    with side, pytest.raises(Unordered):
        x + 1.0
    side.wait_event(torch.accelerator.current_stream(x.device).record_event())
    with side:
        y = x + 1.0
    with pytest.raises(Unordered):
        x.zero_()  # which the side may still read
    side.record_event().synchronize()
    assert (x.zero_() + y).tolist() == [1.0, 3.0, 5.0, 7.0]


def test_a_gradient_is_the_hosts() -> None:
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1)), torch.randn(5, 4)
    layer(x).square().mean().backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    layer.to(NAME)
    layer(x.to(NAME)).square().mean().backward()
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), gradient)
