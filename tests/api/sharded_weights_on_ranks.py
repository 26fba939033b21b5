"""One of several ranks that hold shards of a model: what is gathered, written and put back is what one process would have, bit for bit.

RANK, WORLD_SIZE and STORE in the environment; ends with an AssertionError where it is not.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gossamer.channel import News, Order, Ranks
from gossamer.optim.fragments import split
from gossamer.peer.model.trainable import shapes_of, trainable_tensors
from gossamer.peer.trainer.weights import Weights
from gossamer.rank_program import RankProgram

rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=Path(os.environ["STORE"]).absolute().as_uri(), rank=rank, world_size=count)
torch.manual_seed(0)


def build() -> nn.Module:
    """Rows that three ranks cannot share evenly, fewer rows than ranks, and buffers."""
    return nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Linear(7, 2), nn.Linear(2, 13, bias=False))


alone, model = build(), build()
model.load_state_dict(alone.state_dict())
fully_shard(model[0], mesh=init_device_mesh("cpu", (count,)))
fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
ranks = Ranks()
rows = torch.randn(5, 3)
own = RankProgram(model, (), lambda: model(rows).square().mean(dim=1), {}, ranks)
expected = Weights(trainable_tensors(alone))
assert shapes_of(own.parameters) == shapes_of(expected.tensors)


def whole() -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in own.parameters.items()}


def agree(values: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.tensors.items():
        assert torch.equal(values[name], tensor), name


def agree_in_losses() -> None:
    """The shards that were written to count in the next forward pass: no whole weights are left from the last."""
    alone.eval()
    with torch.no_grad():
        ours, theirs = own.losses().values, tuple(alone(rows).square().mean(dim=1).tolist())
        assert ours == theirs, (ours, theirs)


def lead() -> None:
    weights = own.weights
    for fragment in fragments:
        shift, values = torch.rand(fragment.numel), torch.randn(fragment.numel)  # no variance below zero
        assert torch.equal(weights.gather(fragment), expected.gather(fragment))
        for each in (weights, expected):
            each.add(fragment, shift)
        agree_in_losses()
        for each in (weights, expected):
            with each.remembered() as put_back:
                each.scatter(fragment, values)
                put_back()
            with each.remembered({piece.name for piece in fragment.pieces}):
                each.add(fragment, shift)
        agree_in_losses()
        own.even_out(fragment)
        agree(weights.values())
    weights.restore({name: tensor.double() for name, tensor in reversed(weights.values().items())})
    agree(weights.values())
    ranks.end(News(False, False, False, 7, 8))


fragments = split(shapes_of(own.parameters), 10)
assert max(len({piece.rows for piece in fragment.pieces}) for fragment in fragments) > 1, "some tensors are cut at rows"
if ranks.is_first:
    lead()
    state = {name: tensor.detach().clone() for name, tensor in expected.tensors.items()}
else:
    while isinstance(sent := ranks.next(), Order):
        own.obey(sent)
    assert sent == News(False, False, False, 7, 8)
    state = {name: torch.empty(tensor.shape) for name, tensor in expected.tensors.items()}
for name, tensor in whole().items():
    ranks.broadcast(state[name])
    assert torch.equal(tensor, state[name]), name
ranks.close()
dist.destroy_process_group()
