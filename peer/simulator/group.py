"""DiLoCo and Streaming DiLoCo: everybody sends pseudo-gradients of a fragment, and all take the same outer step on their mean.

DiLoCo sends all fragments together every inner_steps and waits; Streaming DiLoCo sends them in turn and takes the mean some steps later,
while training goes on. A peer that comes back starts from the group's weights. What is counted as sent is one copy per exchange: the
least that a group can send, whichever way it passes messages on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from torch import Tensor

from optim.diloco import DiLoCoSettings, StreamingSchedule, contributor_mean, mean_gradient, mix, outer_step
from peer.simulator.channel import Channel
from peer.simulator.lockstep import slowest_step, steps_together
from peer.simulator.population import Population

Mean = Callable[[Sequence[Tensor], Sequence[float]], Tensor]  # of decoded pseudo-gradients, by weights


def every_coordinate(decoded: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Average each value over those who sent it; see optim.diloco.contributor_mean. The weights play no part."""
    return contributor_mean(decoded)


@dataclass(frozen=True, slots=True)
class GroupRule:
    """How a group synchronizes: what is sent together, when, and what becomes of it."""

    schedule: StreamingSchedule  # of the parts
    parts: tuple[tuple[int, ...], ...]  # fragments that are sent together
    settings: DiLoCoSettings
    keep: float = 0.0  # share of the local weights that a merge keeps
    mean: Mean = mean_gradient


def train_group(population: Population, rule: GroupRule) -> Iterator[Fraction]:
    """Let a group train and synchronize; yield the time after each step."""
    group = Group(population, rule)
    waits = 0 if rule.schedule.overlap_steps else population.scenario.delay_steps
    for step, present in steps_together(population):
        group.step(step, present)
        yield step * slowest_step(population.scenario) + population.traffic.completed * waits


@dataclass(slots=True)
class Shared:
    """A fragment's slow weights and momentum, equal at all peers, and the mean that is on its way."""

    slow: Tensor
    momentum: Tensor
    flying: list[Tensor] = field(default_factory=list)


class Group:
    """All peers of a group; `present` peers take each step together."""

    def __init__(self, population: Population, rule: GroupRule) -> None:
        self._population = population
        self._rule = rule
        first = population.replicas[0].weights
        slices = population.layout.slices
        self.shared = [Shared(first[part].clone(), first.new_zeros(part.stop - part.start)) for part in slices]
        decay = population.scenario.feedback
        self._channels = [[Channel(codec, decay, first.device) for codec in population.layout.codecs] for _ in population.replicas]
        self._tokens = [[0] * len(slices) for _ in population.replicas]
        self._away: set[int] = set()

    def step(self, step: int, present: list[int]) -> None:
        """Take one inner step with the peers that are there, and what the schedule says after it."""
        for peer in self._away.intersection(present):
            self._return(peer)
        self._away = set(range(len(self._population.replicas))).difference(present)
        for peer in present:
            self._population.replicas[peer].inner_step()
            self._tokens[peer] = [tokens + self._population.scenario.step_tokens for tokens in self._tokens[peer]]
        for part in self._rule.schedule.sending(step):
            self._send(step, self._rule.parts[part], present)
        for part in self._rule.schedule.arriving(step):
            self._take(self._rule.parts[part], present)

    def _fast(self, peer: int, fragment: int) -> Tensor:
        return self._population.replicas[peer].weights[self._population.layout.slices[fragment]]

    def _send(self, step: int, fragments: Sequence[int], present: Sequence[int]) -> None:
        for fragment in fragments if present else ():
            shared, decoded = self.shared[fragment], []
            for peer in present:
                channel = self._channels[peer][fragment]
                seed = step * len(self._channels) + peer
                decoded.append(channel.send(shared.slow - self._fast(peer, fragment), seed))
                self._population.traffic.sent(channel.num_bytes)
            shared.flying.append(self._rule.mean(decoded, [self._weight(peer, fragment) for peer in present]))
        self._population.traffic.completed += bool(present)

    def _weight(self, peer: int, fragment: int) -> float:
        """Return how much a peer's pseudo-gradient counts, and start to count anew."""
        tokens, self._tokens[peer][fragment] = self._tokens[peer][fragment], 0
        return float(tokens) if self._population.scenario.token_weights else 1.0

    def _take(self, fragments: Sequence[int], present: Sequence[int]) -> None:
        for fragment in fragments:
            shared = self.shared[fragment]
            if not shared.flying:  # nobody was there to send
                continue
            shared.slow, shared.momentum = outer_step(shared.slow, shared.momentum, shared.flying.pop(0), self._rule.settings)
            for peer in present:
                fast = self._fast(peer, fragment)
                fast.copy_(mix(shared.slow, fast, self._rule.keep))

    def _return(self, peer: int) -> None:
        for fragment, shared in enumerate(self.shared):
            self._fast(peer, fragment).copy_(shared.slow)
        self._tokens[peer] = [0] * len(self.shared)
        self._population.replicas[peer].clock_steps = max(replica.clock_steps for replica in self._population.replicas)
