"""Methods of groups: all peers that are there take the same step at the same time, and wait for the slowest.

`ddp` averages gradients at every step, so that one set of weights stands for all peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from optim.fragments import gather, scatter
from peer.simulator.channel import Channel
from peer.simulator.population import Population
from peer.simulator.scenario import Scenario


def steps_together(population: Population) -> Iterator[tuple[int, list[int]]]:
    """Yield each step's number, from 1 on, and the peers that take it: those that are there when it begins, in steps of the group."""
    for step in range(1, population.scenario.num_steps + 1):
        yield step, [peer for peer in range(population.scenario.num_peers) if not population.presence.is_away(peer, step - 1)]


def slowest_step(scenario: Scenario) -> Fraction:
    """Return how long a step lasts when all wait for the slowest peer, in units of virtual time."""
    return 1 / min(scenario.rates)


def data_parallel(population: Population) -> Iterator[Fraction]:
    """Train one set of weights on the mean gradient of all peers, for which each step waits; yield the time after each step."""
    gradients, scenario = MeanGradient(population), population.scenario
    for step, present in steps_together(population):
        if present:
            gradients.step(present)
        yield step * slowest_step(scenario) + population.traffic.completed * scenario.delay_steps


class MeanGradient:
    """Data-parallel training: every peer's gradient is coded, sent and averaged before the one optimizer steps."""

    def __init__(self, population: Population) -> None:
        self._population = population
        self._replica = population.replicas[0]
        self._own_steps = [0] * population.scenario.num_peers
        layout, device = population.layout, self._replica.weights.device
        self._channels = [
            [Channel(codec, population.scenario.feedback, device) for codec in layout.codecs] for _ in range(population.scenario.num_peers)
        ]
        self._mean = self._replica.weights.new_empty(layout.numel)

    def step(self, present: list[int]) -> None:
        """Take one step with the peers that are there."""
        self._mean.zero_()
        for peer in present:
            self._replica.add_gradient(self._population.texts.batches[peer], self._own_steps[peer])
            self._own_steps[peer] += 1
            self._send(peer, 1.0 / len(present))
        layout, gradients = self._population.layout, self._replica.gradients()
        for codec, part in zip(layout.codecs, layout.slices, strict=True):
            scatter(codec.fragment, self._mean[part], gradients)
        self._replica.apply_gradient()
        self._population.traffic.completed += 1

    def _send(self, peer: int, weight: float) -> None:
        """Add a peer's gradient, as the others decode it, to the mean."""
        layout, gradients = self._population.layout, self._replica.gradients()
        for channel, codec, part in zip(self._channels[peer], layout.codecs, layout.slices, strict=True):
            seed = self._replica.own_steps * len(self._channels) + peer
            self._mean[part].add_(channel.send(gather(codec.fragment, gradients), seed), alpha=weight)
            self._population.traffic.sent(channel.num_bytes)
        for gradient in gradients.values():
            gradient.zero_()
