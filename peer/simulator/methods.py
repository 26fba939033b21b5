"""The methods by name: how each trains a population, the memory it needs, and the default settings of its paper.

In all methods `alpha` is the outer momentum and `beta` the outer learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Final

from gossamer.optim.diloco import DiLoCoSettings, StreamingSchedule, learning_rate_for
from gossamer.optim.noloco import NoLoCo
from gossamer.peer.simulator.groups import GroupRule, data_parallel, feedback_decay, train_group
from gossamer.peer.simulator.hostile import members
from gossamer.peer.simulator.pairs import gossip, train_alone
from gossamer.peer.simulator.population import Population, Size
from gossamer.peer.simulator.scenario import Scenario, known
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest

Train = Callable[[Population], Iterator[Fraction]]
Defaults = Callable[[int], Mapping[str, Any]]  # by the number of peers
PAIR_CODEC: Final = Manifest().codec.name  # the default of real peers, which meet in pairs


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table."""

    train: Callable[[Scenario, int], Train]  # for a scenario and a number of fragments; raises BadSettings
    defaults: Defaults  # of settings that neither the manifest nor the command line sets
    own_vectors: int = 0  # kept per replica beside the inner optimizer
    common_vectors: int = 0
    one_replica: bool = False
    at_own_rate: bool = False  # peers step independently and meet in pairs or never, without error feedback; else all together
    uses: tuple[str, ...] = ()  # of the settings that only some methods use
    own_length: bool = False  # at own rates: a schedule is as long as its peer's training; else all follow the fastest peer

    def size(self, scenario: Scenario) -> Size:
        """Return the memory that a scenario needs with this method."""
        keeps_residuals = not self.at_own_rate and feedback_decay(scenario.manifest.codec.name, scenario.feedback) > 0.0
        own_vectors = self.own_vectors + (scenario.manifest.num_stages > 1)  # all replicas' gradients at once
        return Size(scenario.num_peers, own_vectors, self.common_vectors, int(keeps_residuals), self.one_replica)

    def schedules(self, scenario: Scenario) -> list[Fraction]:
        """Return the rate at which each replica's learning rate follows its schedule."""
        if self.own_length:
            return list(scenario.rates)
        rate = max(scenario.rates) if self.at_own_rate else Fraction(1)
        return [rate] * (1 if self.one_replica else scenario.num_peers)


def pair_rule(scenario: Scenario) -> NoLoCo:
    """Return NoLoCo's step with the scenario's constants. Raises BadSettings outside its stable range."""
    outer = scenario.manifest.outer
    try:
        return NoLoCo(outer.alpha, outer.beta, outer.gamma)
    except ValueError as error:
        raise BadSettings(str(error), hint="change alpha or gamma") from None


def _group(*, nesterov: bool, streams: bool = False) -> Callable[[Scenario, int], Train]:
    """Make the training of a group that exchanges all fragments at once and waits, or streams them in turn."""

    def train(scenario: Scenario, num_fragments: int) -> Train:
        overlap_steps = math.ceil(scenario.delay_steps / scenario.slowest_step) if streams else 0
        try:
            schedule = StreamingSchedule(num_fragments if streams else 1, scenario.period, overlap_steps)
        except ValueError as error:
            raise BadSettings(str(error), hint="lower --delay or raise --inner-steps") from None
        outer = scenario.manifest.outer
        settings = DiLoCoSettings(outer.beta, outer.alpha, nesterov, scenario.clip, scenario.staleness_penalty)
        return partial(train_group, rule=GroupRule(schedule, settings, scenario.keep_local if streams else 0.0))

    return train


OF_GROUPS: Final = ("delay", "token_weights", "alpha", "beta", "clip", "staleness_penalty", "feedback")
METHODS: Final[dict[str, Method]] = {
    "noloco": Method(
        lambda scenario, _: partial(gossip, rule=pair_rule(scenario), members=members),
        lambda _: {"alpha": 0.0, "beta": 1.0, "gamma": 1.0, "codec": PAIR_CODEC},
        own_vectors=2,
        at_own_rate=True,
        uses=("delay", "token_weights", "alpha", "beta", "gamma", "no_partner", "matching", "attack", "attackers"),
    ),
    "diloco": Method(_group(nesterov=True), lambda _: {"alpha": 0.9, "beta": 0.7, "codec": "fp32"}, common_vectors=2, uses=OF_GROUPS),
    "diloco-heavy-ball": Method(
        _group(nesterov=False), lambda _: {"alpha": 0.3, "beta": 0.7, "codec": "fp32"}, common_vectors=2, uses=OF_GROUPS
    ),
    "streaming": Method(
        _group(nesterov=True, streams=True),
        lambda num_peers: {
            "alpha": 0.9,
            "beta": learning_rate_for(num_peers),
            "codec": "e3m0",
            "delay": Fraction(1),
            "blocks_per_fragment": 3,
        },
        common_vectors=3,
        uses=(*OF_GROUPS, "keep_local"),
    ),
    "ddp": Method(
        lambda scenario, _: data_parallel, lambda _: {"codec": "fp32"}, common_vectors=1, one_replica=True, uses=("delay", "feedback")
    ),
    "local": Method(lambda scenario, _: train_alone, lambda _: {"codec": "fp32"}, at_own_rate=True, own_length=True),
}
OF_SOME_METHODS: Final = frozenset(name for row in METHODS.values() for name in row.uses)


def method(name: str) -> Method:
    """Return the method of that name. Raises BadSettings with a suggestion."""
    return METHODS[known(name, METHODS, "method")]
