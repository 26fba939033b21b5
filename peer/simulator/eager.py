"""DiLoCo with eager updates: a group's mean may take a whole round to arrive, one's own part of it counts at once.

Eager updates (arXiv 2502.12996): each round a peer steps with the mean of the round before, its own old part replaced by its new one. So
peers differ by no more than their newest parts. All fragments go together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from optim.diloco import DiLoCoSettings, eager_gradient, mean_gradient, outer_step
from peer.simulator.channel import Channel
from peer.simulator.lockstep import slowest_step, steps_together
from peer.simulator.population import Population
from peer.simulator.replicas import SimulatedReplica


@dataclass(slots=True)
class EagerPeer:
    """One peer's slow weights, momentum, and what the others decoded of it in the round before; all flat."""

    replica: SimulatedReplica
    channels: list[Channel]
    slow: Tensor
    momentum: Tensor
    late: Tensor


def train_eagerly(population: Population, settings: DiLoCoSettings) -> Iterator[Fraction]:
    """Let a group train with eager updates, the same peers in every round; yield the time after each step."""
    members = [_member(population, replica) for replica in population.replicas]
    for step, _ in steps_together(population):
        for member in members:
            member.replica.inner_step()
        if step % population.scenario.manifest.outer.inner_steps == 0:
            _round(population, members, settings, step)
        yield step * slowest_step(population.scenario)


def _member(population: Population, replica: SimulatedReplica) -> EagerPeer:
    weights, decay = replica.weights, population.scenario.feedback
    channels = [Channel(codec, decay, weights.device) for codec in population.layout.codecs]
    return EagerPeer(replica, channels, weights.clone(), weights.new_zeros(weights.shape), weights.new_zeros(weights.shape))


def _round(population: Population, members: list[EagerPeer], settings: DiLoCoSettings, step: int) -> None:
    late_mean = mean_gradient([member.late for member in members], [1.0] * len(members))
    for member in members:
        decoded = _sent(population, member, step * len(members) + member.replica.number)
        gradient = eager_gradient(late_mean, member.late, decoded, len(members))
        member.slow, member.momentum = outer_step(member.slow, member.momentum, gradient, settings)
        member.replica.weights.copy_(member.slow)
        member.late = decoded
    population.traffic.completed += 1


def _sent(population: Population, member: EagerPeer, seed: int) -> Tensor:
    """Send a member's pseudo-gradient and return what everybody decodes."""
    decoded = member.slow - member.replica.weights
    for channel, part in zip(member.channels, population.layout.slices, strict=True):
        decoded[part] = channel.send(decoded[part], seed)
        population.traffic.sent(channel.num_bytes)
    return decoded
