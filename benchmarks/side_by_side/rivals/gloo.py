"""torch's gloo: local SGD, which averages all weights every n steps, and DDP, which averages all gradients at each step."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.side_by_side.job import Seat
from benchmarks.side_by_side.network import INSIDE
from benchmarks.side_by_side.rivals.periodic import PeriodicAveraging
from benchmarks.side_by_side.training import Training

PORT = 29_500  # of the rendezvous, at peer 1


def connect(seat: Seat) -> None:
    """Join the process group at peer 1."""
    os.environ["GLOO_SOCKET_IFNAME"] = INSIDE
    dist.init_process_group("gloo", init_method=f"tcp://{seat.addresses[0]}:{PORT}", rank=seat.number - 1, world_size=seat.job.num_peers)


class LocalSGD(PeriodicAveraging):
    """All-reduce of the weights every `every_steps`, as one vector."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        connect(training.seat)

    def average(self) -> None:
        """Reduce to the sum, and divide."""
        flat = torch.cat([parameter.view(-1) for parameter in self.parameters])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        start = 0
        for parameter in self.parameters:
            parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class DDP:
    """DistributedDataParallel by default: sends buckets of gradients during the backward pass."""

    def __init__(self, training: Training) -> None:
        connect(training.seat)
        self._training = training
        self._backward_over_s = 0.0  # when the last bucket was handed over
        training.module = DistributedDataParallel(training.model)
        training.module.register_comm_hook(dist.group.WORLD, lambda group, bucket: self._hand_over(group, bucket))
        training.inner.register_step_pre_hook(lambda *_: self._count_wait())

    def _hand_over(self, group: Any, bucket: Any) -> Any:
        """Reduce as DDP does by default, and record the time."""
        self._backward_over_s = time.monotonic()
        return allreduce_hook(group, bucket)

    def _count_wait(self) -> None:
        self._training.blocked_s += time.monotonic() - self._backward_over_s

    def after_step(self, own_steps: int) -> None:
        """Do nothing: the gradients were averaged before the step."""

    def finish(self) -> None:
        """Do nothing: all peers have the same weights."""

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
