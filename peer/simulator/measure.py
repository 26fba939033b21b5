"""What is measured of replicas: held-out losses, their mean weights, and how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from peer.model.evaluation import held_out_loss
from peer.simulator.replicas import SimulatedReplica
from peer.text.corpus import Corpus


def mean_weights(replicas: Sequence[SimulatedReplica]) -> Tensor:
    """Return the mean of the replicas' fast weights: a new flat vector, exactly theirs when all are equal."""
    first = replicas[0].weights
    away = first.new_zeros(first.shape)
    for replica in replicas[1:]:
        away.add_(replica.weights - first)
    return away.div_(len(replicas)).add_(first)


def weight_std(replicas: Sequence[SimulatedReplica]) -> float:
    """Return the root mean square distance of the replicas' fast weights from their mean (NoLoCo, Figure 3B, not normalized)."""
    mean = mean_weights(replicas)
    squares = [float((replica.weights - mean).square_().mean()) for replica in replicas]
    return math.sqrt(math.fsum(squares) / len(squares))


def losses(replicas: Sequence[SimulatedReplica], held_out: Corpus, num_batches: int) -> list[float]:
    """Return each replica's held-out loss, nats per token."""
    return [held_out_loss(replica.model, held_out, num_batches) for replica in replicas]


def averaged_loss(replicas: Sequence[SimulatedReplica], held_out: Corpus, num_batches: int) -> float:
    """Return the held-out loss of the replicas' mean weights, nats per token."""
    with _holding(replicas[0], mean_weights(replicas)):
        return held_out_loss(replicas[0].model, held_out, num_batches)


@contextmanager
def _holding(replica: SimulatedReplica, weights: Tensor) -> Iterator[None]:
    """Put other weights into a replica for a while."""
    own = replica.weights.clone()
    replica.weights.copy_(weights)
    try:
        yield
    finally:
        replica.weights.copy_(own)
