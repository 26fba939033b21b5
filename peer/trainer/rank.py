"""One of several processes that train one model together, each on a device of its own.

Every rank has all weights and computes the gradient of its rows of a batch. Each parameter belongs to one rank, which gets the sum of the
parameter's gradient, moves it with its optimizer and gives it to the others. So no rank can drift from the others.

The first rank orders and the others `follow`: an order is one line of JSON on their stdin, `[method, arguments]`. Tensors travel through
torch.distributed: gloo on the CPU, torch's choice on GPUs (nccl, xccl); both stay on this machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.optim.codecs.hadamard import keep_products_exact
from gossamer.optim.inner import divide_parameters, gradient_of
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.units import size_bytes
from gossamer.peer.model.adapter import trained_parameters
from gossamer.peer.model.computing import Computing, compute_dtype
from gossamer.peer.model.evaluation import mask_as_run
from gossamer.peer.model.model import unset_model
from gossamer.peer.model.trainable import shapes_of
from gossamer.peer.trainer.device import OneDevice, keep_within
from gossamer.protocol.run.manifest import Manifest, SignedManifest, need_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST: Final = 0  # the rank that has the text, the outer state and the link
LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"


class RankSettings(NamedTuple):
    """What a rank is started with: its first line, as a list."""

    number: int
    num_ranks: int
    device: str
    threads: int  # 0: torch's choice
    gpu_memory: str  # at most, as the setting is written
    manifest: str  # the path of the signed one
    store: str  # the path of the file by which the ranks find each other
    optimizer_on_host: bool


def join(store: Path, number: int, count: int, kind: str) -> None:
    """Meet the other ranks of this machine, all on devices of one kind; waits for them."""
    os.environ |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}  # no port is open to other machines
    backends = {"cpu": dist.Backend.GLOO, kind: dist.get_default_backend_for_device(kind)}
    backend = ",".join(":".join(one) for one in backends.items())
    dist.init_process_group(backend, init_method=store.absolute().as_uri(), rank=number, world_size=count)


class Rank:
    """One rank's model. All ranks call every method at once, and wait for each other. Raises RuntimeError where another rank is gone."""

    def __init__(self, manifest: Manifest, model: PreTrainedModel, number: int, count: int, optimizer_on_host: bool) -> None:
        shapes = shapes_of(trained_parameters(model))
        self._shares = shares = divide_parameters(manifest.inner.optimizer, shapes, count)
        self.own = own = OneDevice(manifest, model, shares[number], optimizer_on_host)
        self._number = number
        self._num_parameters = len(shapes)
        self._places = [place for place, name in enumerate(shapes) if name in own.moved]
        self._weights = tuple(torch.cat([own.parameters[name].detach().flatten() for name in share]) for share in shares)
        own.gradients = tuple(torch.zeros_like(flat) for flat in self._weights)
        for share, weights, gradients in zip(shares, self._weights, own.gradients, strict=True):
            parameters = [own.parameters[name] for name in share]
            for parameter, weight, gradient in zip(parameters, _cut(weights, parameters), _cut(gradients, parameters), strict=True):
                parameter.data, parameter.grad = weight, gradient
        self._tensors = [tensor.detach() for tensor in chain(model.parameters(), model.buffers())]
        self._versions = [-1] * len(self._tensors)

    def changed(self) -> list[int]:
        """Return the numbers of this rank's tensors that something else than a step has written to since they were shared."""
        versions = (tensor._version for tensor in self._tensors)
        return [number for number, version in enumerate(versions) if version != self._versions[number]]

    def backward(self, changed: Sequence[int], batch: Tensor, seed: int, computing: Computing) -> Tensor | None:
        """Take over the first rank's `changed` tensors and its batch on the CPU; then as OneDevice.backward, for this rank's parameters."""
        _wait([dist.broadcast(tensor, FIRST, async_op=True) for tensor in (batch, *(self._tensors[number] for number in changed))])
        self._versions = [tensor._version for tensor in self._tensors]
        rows = torch.tensor_split(batch, len(self._shares))[self._number]
        loss = self.own.backward(self.own.send(rows), seed + self._number, computing, batch)
        news = torch.tensor([loss is None, 0.0 if loss is None else float(loss)])
        dist.all_reduce(news)
        if float(news[0]):
            return None
        _wait([dist.reduce(flat, owner, async_op=True) for owner, flat in enumerate(self.own.gradients)])
        return news[1]

    def clip(self, most: float) -> Tensor:
        """As OneDevice.clip."""
        lengths = torch.zeros(self._num_parameters)
        own = [torch.linalg.vector_norm(gradient_of(parameter)) for parameter in self.own.moved.values()]
        lengths[self._places] = torch.stack(own).cpu()
        dist.all_reduce(lengths)
        length: Tensor = torch.linalg.vector_norm(lengths)
        torch.nn.utils.clip_grads_with_norm_(self.own.moved.values(), most, length)
        return length

    def step(self, rate: float) -> None:
        """As OneDevice.step."""
        self.own.step(rate)
        _wait([dist.broadcast(flat, owner, async_op=True) for owner, flat in enumerate(self._weights)])
        self._versions = [tensor._version for tensor in self._tensors]

    def give_state(self) -> dict[str, Tensor]:
        """Send the first rank the state of this rank's optimizer; return the state of all of them there."""
        kept = self.own.state()
        if self._number == FIRST:
            for sender in range(1, len(self._shares)):
                kept |= _receive(sender)
        else:
            _send(kept, FIRST)
        return kept

    def take_state(self, state: Mapping[str, Tensor] | None = None) -> None:
        """Restore the state of each rank's optimizer from `state`, which only the first rank passes."""
        if state is None:
            self.own.restore(_receive(FIRST))
            return
        for receiver, share in enumerate(self._shares):
            part = {name: value for name, value in state.items() if name.split("/", 1)[1] in set(share)}
            if receiver == FIRST:
                self.own.restore(part)
            else:
                _send(part, receiver)


def follow(next_line: Callable[[], bytes]) -> NoReturn:
    """Be a rank beside the first. `next_line` returns the settings, then orders. Raises RuntimeError where a rank is gone."""
    settings = RankSettings(*json.loads(next_line()))
    manifest, device = need_text(SignedManifest.from_bytes(Path(settings.manifest).read_bytes()).manifest()), torch.device(settings.device)
    keep_products_exact()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    keep_within(device, size_bytes(settings.gpu_memory))
    model = unset_model(manifest.model, device)  # with any weights
    mask_as_run(model, manifest, Home(Path(settings.manifest).parent).tokenizer)
    join(Path(settings.store), settings.number, settings.num_ranks, device.type)
    rank = Rank(manifest, model, settings.number, settings.num_ranks, settings.optimizer_on_host)
    dtype = compute_dtype(manifest.inner.precision, device)

    def backward(changed: Sequence[int], shape: Sequence[int], seed: int, *cut: Any) -> None:
        rank.backward(changed, torch.empty(shape, dtype=torch.int64), seed, Computing(dtype, *cut))

    own = (rank.clip, rank.step, rank.give_state, rank.take_state, rank.own.forget)
    orders: dict[str, Callable[..., object]] = {"backward": backward} | {method.__name__: method for method in own}
    while True:
        name, arguments = json.loads(next_line())
        orders[name](*arguments)


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _send(tensors: Mapping[str, Tensor], receiver: int) -> None:
    """Send f32 tensors by name. Their names and shapes travel as JSON, not as torch's pickled objects."""
    header = json.dumps([[name, *tensor.shape] for name, tensor in tensors.items()]).encode()
    dist.send(torch.tensor([len(header)]), receiver)
    dist.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), receiver)
    for tensor in tensors.values():
        dist.send(tensor.cpu(), receiver)


def _receive(sender: int) -> dict[str, Tensor]:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, sender)
    header = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(header, sender)
    tensors = {name: torch.empty(shape) for name, *shape in json.loads(header.numpy().tobytes())}
    for tensor in tensors.values():
        dist.recv(tensor, sender)
    return tensors
