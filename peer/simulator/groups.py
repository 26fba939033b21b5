"""Group methods: all peers that are present take the same step at the same time, wait for the slowest, and send to the whole group.

`ddp` averages gradients at every step, so one set of weights stands for all peers. DiLoCo sends all fragments together every inner_steps
and waits. Streaming DiLoCo sends them in turn and takes the mean some steps later. A returning peer starts from the group's weights. The
bytes counted are one copy per exchange: a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

import torch
from torch import Tensor

from gossamer.optim.codecs import PACKINGS
from gossamer.optim.diloco import DiLoCoSettings, StreamingSchedule, mean_gradient, mix, outer_step
from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.fragments import gather, scatter
from gossamer.peer.simulator.population import Layout, Population, SimulatedReplica, coding

# As the codecs' papers: arXiv 2503.09799 none from 4 bits up, 1-bit Adam 1.
FEEDBACK_DECAY: Final = {"q2": 1.0, "sign1": 1.0}


def feedback_decay(codec: str, decay: float | None) -> float:
    """Return the decay of a codec's error feedback: `decay`, or the codec's default for None; 0: no feedback."""
    chosen = FEEDBACK_DECAY.get(codec, 0.0) if decay is None else decay
    return chosen if codec in PACKINGS else 0.0


class Channel:
    """Sends one peer's tensors of one fragment to its group: coded once, decoded alike by every peer, the sender included.

    A message is decoded against a message of zeros. So the window of a modulo codec spans the values themselves, and blocks that do not
    decode count as zero. With error feedback (SparseLoCo, arXiv 2508.15706), the loss of one message, times the decay, is added to the
    next. `residual` is that loss; None without feedback.
    """

    def __init__(self, codec: FragmentCodec, decay: float | None, device: torch.device) -> None:
        self._codec = codec
        self._decay = feedback_decay(codec.codec.name, decay)
        self.residual = torch.zeros(codec.fragment.numel, device=device) if self._decay else None

    @property
    def num_bytes(self) -> int:
        """Return the size of one message."""
        return self._codec.sketch_bytes + self._codec.payload_bytes

    def send(self, values: Tensor, seed: int) -> Tensor:
        """Return the tensor that every peer decodes of f32[numel] values: a new one. Raises Diverged for values that cannot be sent."""
        with coding("a group of peers"):
            return self.decode(*self.encode(values, seed), seed)

    def encode(self, values: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return sketch and payload, and keep the loss where there is feedback. Raises ValueError for values that cannot be sent."""
        wanted = values if self.residual is None else self.residual.mul_(self._decay).add_(values)
        sketch, of_zeros = self._codec.sketch(wanted, seed), self._codec.sketch(torch.zeros_like(wanted), seed)
        payload = self._codec.encode(wanted, seed, sketch, of_zeros).payload
        if self.residual is not None:
            self.residual = wanted - self.decode(sketch, payload, seed)
        return sketch, payload

    def decode(self, sketch: Tensor, payload: Tensor, seed: int) -> Tensor:
        """Return the decoded f32[numel]; the same for every peer's channel of this fragment, whatever that peer has sent."""
        zeros = torch.zeros(self._codec.fragment.numel, device=payload.device)
        own = self._codec.encode(zeros, seed, self._codec.sketch(zeros, seed), sketch)
        return self._codec.gap(own, payload).values


class Broadcast:
    """Every peer's channels, fragment by fragment; counts the bytes sent."""

    def __init__(self, population: Population) -> None:
        scenario, codecs, device = population.scenario, population.layout.codecs, population.replicas[0].weights.device
        self._traffic = population.traffic
        self._channels = [[Channel(codec, scenario.feedback, device) for codec in codecs] for _ in range(scenario.num_peers)]

    def send(self, step: int, peer: int, fragment: int, values: Tensor) -> Tensor:
        """Send a peer's values of a fragment at a step; return the tensor that every peer decodes. Raises Diverged."""
        channel = self._channels[peer][fragment]
        self._traffic.sent_bytes += channel.num_bytes
        return channel.send(values, step * len(self._channels) + peer)


def data_parallel(population: Population) -> Iterator[Fraction]:
    """Train one set of weights on the mean gradient of all peers, waiting for it in each step; yield the time after each step."""
    scenario, layout, [replica], traffic = population.scenario, population.layout, population.replicas, population.traffic
    broadcast, mean, own_steps = Broadcast(population), torch.empty_like(replica.weights), [0] * scenario.num_peers
    for step, present in scenario.steps_together():
        mean.zero_()
        for peer in present:
            replica.add_gradient(population.texts.batches[peer], own_steps[peer])
            own_steps[peer] += 1
            for fragment, gradient in enumerate(_taken_gradients(replica, layout)):
                mean[layout.slices[fragment]].add_(broadcast.send(replica.own_steps, peer, fragment, gradient), alpha=1.0 / len(present))
        if present:
            for codec, part in zip(layout.codecs, layout.slices, strict=True):
                scatter(codec.fragment, mean[part], replica.gradients())
            replica.apply_gradient()
            traffic.completed += 1
        yield step * scenario.slowest_step + traffic.completed * scenario.delay_steps


def _taken_gradients(replica: SimulatedReplica, layout: Layout) -> Iterator[Tensor]:
    gradients = replica.gradients()
    for codec in layout.codecs:
        yield gather(codec.fragment, gradients)
    for gradient in gradients.values():
        gradient.zero_()


@dataclass(frozen=True, slots=True)
class GroupRule:
    """How a group synchronizes: the schedule, the outer step, and the merge."""

    schedule: StreamingSchedule  # of single fragments; a schedule of one fragment stands for all of them together
    settings: DiLoCoSettings
    keep: float = 0.0  # share of the local weights that a merge keeps


def train_group(population: Population, rule: GroupRule) -> Iterator[Fraction]:
    """Let a group train and synchronize; yield the time after each step."""
    group, scenario = Group(population, rule), population.scenario
    waits = 0 if rule.schedule.overlap_steps else scenario.delay_steps
    for step, present in scenario.steps_together():
        group.step(step, present)
        yield step * scenario.slowest_step + population.traffic.completed * waits


@dataclass(slots=True)
class Shared:
    """A fragment's slow weights and momentum, equal at all peers, and the means that have not arrived yet."""

    slow: Tensor
    momentum: Tensor
    flying: list[Tensor] = field(default_factory=list)


class Group:
    """All peers of a group; `present` peers take each step together."""

    def __init__(self, population: Population, rule: GroupRule) -> None:
        self._population = population
        self._rule = rule
        first = population.replicas[0].weights
        self.shared = [Shared(first[part].clone(), torch.zeros_like(first[part])) for part in population.layout.slices]
        self._broadcast = Broadcast(population)
        self._tokens = [[0] * len(self.shared) for _ in population.replicas]
        self._away: set[int] = set()

    def step(self, step: int, present: list[int]) -> None:
        """Take one inner step with the present peers, then send and merge what the schedule says."""
        for peer in self._away.intersection(present):
            self._return(peer)
        self._away = set(range(len(self._population.replicas))).difference(present)
        for peer in present:
            self._population.replicas[peer].inner_step()
            self._tokens[peer] = [tokens + self._population.scenario.step_tokens for tokens in self._tokens[peer]]
        for scheduled in self._rule.schedule.sending(step):
            self._send(step, self._fragments(scheduled), present)
        for scheduled in self._rule.schedule.arriving(step):
            self._take(self._fragments(scheduled), present)

    def _fragments(self, scheduled: int) -> Sequence[int]:
        return range(len(self.shared)) if self._rule.schedule.num_fragments == 1 else [scheduled]

    def _fast(self, peer: int, fragment: int) -> Tensor:
        return self._population.replicas[peer].weights[self._population.layout.slices[fragment]]

    def _send(self, step: int, fragments: Sequence[int], present: Sequence[int]) -> None:
        for fragment in fragments if present else ():
            shared = self.shared[fragment]
            decoded = [self._broadcast.send(step, peer, fragment, shared.slow - self._fast(peer, fragment)) for peer in present]
            shared.flying.append(mean_gradient(decoded, [self._weight(peer, fragment) for peer in present]))
        self._population.traffic.completed += bool(present)

    def _weight(self, peer: int, fragment: int) -> float:
        """Return the weight of a peer's pseudo-gradient, and restart its token count."""
        tokens, self._tokens[peer][fragment] = self._tokens[peer][fragment], 0
        return float(tokens) if self._population.scenario.token_weights else 1.0

    def _take(self, fragments: Sequence[int], present: Sequence[int]) -> None:
        for fragment in fragments:
            shared = self.shared[fragment]
            if not shared.flying:  # no peer was present to send
                continue
            shared.slow, shared.momentum = outer_step(shared.slow, shared.momentum, shared.flying.pop(0), self._rule.settings)
            for peer in present:
                fast = self._fast(peer, fragment)
                fast.copy_(mix(shared.slow, fast, self._rule.keep))

    def _return(self, peer: int) -> None:
        for fragment, shared in enumerate(self.shared):
            self._fast(peer, fragment).copy_(shared.slow)
        self._tokens[peer] = [0] * len(self.shared)
        self._population.replicas[peer].global_step = max(replica.global_step for replica in self._population.replicas)
