"""Staged runs in a simulation: each replica holds every stage, and a micro-batch takes each stage from one of the replicas.

Random routes follow NoLoCo (arXiv 2506.10911, section 3.1): a permutation of the replicas for each micro-batch and boundary, so each one
computes as many. The backward pass takes the same way back and computes each stage again from its input, as a holder does. With `hop_delay`
a gradient arrives that many inner steps later at the stage before, which then computes with the weights that it has by then.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from gossamer.optim.codecs.activations import ACTIVATIONS
from gossamer.peer.model.computing import next_token_loss
from gossamer.peer.model.stages import manifest_cuts, stage_of, stage_output
from gossamer.peer.simulator.population import Population
from gossamer.peer.simulator.scenario import FIXED
from gossamer.protocol.run.manifest import StagedManifest


@dataclass(slots=True)
class MicroBatch:
    """Sequences on their way through the stages: `path` has the number of the replica that computes each stage."""

    tokens: Tensor  # int64[rows, L+1]
    path: tuple[int, ...]
    inputs: list[Tensor | None] = field(default_factory=lambda: [None])  # of each stage, as received; the first reads the tokens


class Stages:
    """The stages of all replicas. Marks the replicas as routed, and lets each clip the gradient of each stage alone."""

    def __init__(self, population: Population) -> None:
        assert isinstance(manifest := population.scenario.manifest, StagedManifest)
        cuts = manifest_cuts(manifest)
        self._scenario, self._section, self._batch_size = population.scenario, manifest.stages, manifest.inner.batch_size
        self._codec = ACTIVATIONS[manifest.stages.activations]
        self._replicas = population.replicas
        self._stages = [[stage_of(replica.model, cut) for cut in cuts] for replica in self._replicas]
        self._dtype = self._replicas[0].dtype
        self._returning: defaultdict[int, list[tuple[MicroBatch, int, Tensor]]] = defaultdict(list)  # by step
        self._step = 0
        for replica, stages in zip(self._replicas, self._stages, strict=True):
            replica.is_routed = True
            replica.clipped = [list(stage.parameters()) for stage in stages]

    def add_gradients(self, arrived: list[int]) -> None:
        """Send the next batch of each of these peers through their stages, and add the gradients that are back by now."""
        for back in self._returning.pop(self._step, []):
            self._backward(*back)
        drivers = [self._replicas[peer] for peer in arrived]
        rows = self._section.micro_batch
        parts = {one.number: torch.split(one.batches.batch(one.own_steps).to(one.weights.device), rows) for one in drivers}
        losses: dict[int, list[Tensor]] = {number: [] for number in parts}
        for index in range(self._batch_size // rows):
            for path in self._paths(arrived, index):
                losses[path[0]].append(self._forward(MicroBatch(parts[path[0]][index], path)))
        for replica in drivers:
            replica.losses.append(float(torch.stack(losses[replica.number]).mean()))
        self._step += 1

    def _paths(self, numbers: list[int], index: int) -> list[tuple[int, ...]]:
        """Return the way of each driver's micro-batch of this index."""
        columns = [numbers]
        for boundary in range(1, self._section.count):
            draw = Random(f"{self._scenario.seed}/route/{self._step}/{index}/{boundary}")
            columns.append(numbers if self._scenario.routing == FIXED else draw.sample(numbers, len(numbers)))
        return list(zip(*columns, strict=True))

    def _forward(self, micro: MicroBatch) -> Tensor:
        """Compute all stages, and the last one's gradient; return the loss."""
        last = self._section.count - 1
        with torch.no_grad():
            for stage in range(last):
                output = stage_output(self._stages[micro.path[stage]][stage], micro.tokens, micro.inputs[stage], self._dtype)
                micro.inputs.append(self._received(output))
        received = micro.inputs[last]
        assert received is not None
        loss = next_token_loss(self._stages[micro.path[last]][last], micro.tokens, self._dtype, received.requires_grad_())
        torch.autograd.backward(loss * (len(micro.tokens) / self._batch_size))
        self._send_back(micro, last)
        return loss.detach()

    def _backward(self, micro: MicroBatch, stage: int, gradient: Tensor) -> None:
        """Compute a stage again, add its gradient, and send that of its input on."""
        received = micro.inputs[stage]
        output = stage_output(
            self._stages[micro.path[stage]][stage], micro.tokens, None if received is None else received.requires_grad_(), self._dtype
        )
        torch.autograd.backward(output, gradient)
        if stage:
            self._send_back(micro, stage)

    def _send_back(self, micro: MicroBatch, stage: int) -> None:
        """Send the gradient of a stage's input to the stage before."""
        received = micro.inputs.pop()
        assert received is not None and received.grad is not None
        back = micro, stage - 1, self._received(received.grad)
        if self._scenario.hop_delay:
            self._returning[self._step + self._scenario.hop_delay].append(back)
        else:
            self._backward(*back)

    def _received(self, values: Tensor) -> Tensor:
        """Return what the other side decodes: a new tensor. Raises ValueError for values that are not finite."""
        flat = values.flatten()
        return self._codec.unpack(self._codec.pack(flat), flat.numel()).view(values.shape).clone()
