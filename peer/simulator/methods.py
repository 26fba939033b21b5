"""The methods by name: how each trains a population, what it needs to keep, and the settings its paper gives it.

In all of them `alpha` is the outer momentum and `beta` the outer learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Final

from gossamer.optim.diloco import DiLoCoSettings, StreamingSchedule, learning_rate_for, mean_gradient
from gossamer.optim.gossip import GASLoC, SlowMo
from gossamer.optim.noloco import NoLoCo, PairRule
from gossamer.peer.simulator.groups import GroupRule, Mean, data_parallel, every_coordinate, feedback_decay, train_eagerly, train_group
from gossamer.peer.simulator.pairs import gossip, train_alone
from gossamer.peer.simulator.population import Population, Size
from gossamer.peer.simulator.scenario import Scenario, known
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest
from gossamer.protocol.run.sections import OuterSection

Train = Callable[[Population], Iterator[Fraction]]
Defaults = Callable[[int], Mapping[str, Any]]  # by the number of peers
PAIR_CODEC: Final = Manifest().codec.name  # which real peers, who meet in pairs, have by default


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table."""

    train: Callable[[Scenario, int], Train]  # for a scenario and a number of fragments; raises BadSettings
    defaults: Defaults  # for what neither the manifest nor the command line sets
    own_vectors: int = 0  # kept per replica beside the inner optimizer
    common_vectors: int = 0
    one_replica: bool = False
    at_own_rate: bool = False  # each peer steps by itself and meets one other or none, so nobody keeps error feedback; or all together
    own_length: bool = False  # at own rates: each schedule is as long as its peer's training; or all follow the fastest peer's clock

    def size(self, scenario: Scenario) -> Size:
        """Return what a scenario needs with this method."""
        keeps_residuals = not self.at_own_rate and feedback_decay(scenario.manifest.codec.name, scenario.feedback) > 0.0
        return Size(scenario.num_peers, self.own_vectors, self.common_vectors, int(keeps_residuals), self.one_replica)

    def schedules(self, scenario: Scenario) -> list[Fraction]:
        """Return the rate at which each replica's learning rate follows its schedule."""
        if self.own_length:
            return list(scenario.rates)
        rate = max(scenario.rates) if self.at_own_rate else Fraction(1)
        return [rate] * (1 if self.one_replica else scenario.num_peers)


def pairs(name: str, **defaults: Any) -> Method:
    """Make a method of pairs out of a rule."""
    mine = {"codec": PAIR_CODEC, **defaults}
    return Method(lambda scenario, _: partial(gossip, rule=pair_rule(name, scenario)), lambda _: mine, own_vectors=2, at_own_rate=True)


def pair_rule(name: str, scenario: Scenario) -> PairRule:
    """Return the rule of a method of pairs with the scenario's constants. Raises BadSettings outside its stable range."""
    try:
        return PAIR_RULES[name](scenario.manifest.outer)
    except ValueError as error:
        raise BadSettings(str(error), hint="change alpha or gamma") from None


def group(*, nesterov: bool, mean: Mean = mean_gradient, **defaults: Any) -> Method:
    """Make a method in which a group exchanges everything at once and waits."""

    def train(scenario: Scenario, _: int) -> Train:
        schedule = StreamingSchedule(1, scenario.period, 0)
        return partial(train_group, rule=GroupRule(schedule, _outer(scenario, nesterov=nesterov), mean=mean))

    return Method(train, lambda _: defaults, common_vectors=2)


def _streaming(scenario: Scenario, num_fragments: int) -> Train:
    inner_steps, overlap_steps = scenario.period, math.ceil(scenario.delay_steps / scenario.slowest_step)
    try:
        schedule = StreamingSchedule(num_fragments, inner_steps, overlap_steps)
    except ValueError as error:
        raise BadSettings(str(error), hint="lower --delay or raise --inner-steps") from None
    return partial(train_group, rule=GroupRule(schedule, _outer(scenario, nesterov=True), keep=scenario.keep_local))


def _eager(scenario: Scenario, num_fragments: int) -> Train:
    if scenario.drop_out:
        raise BadSettings("eager updates need the same peers in every round", hint="leave --drop-out out, or choose another --method")
    round_steps = scenario.period * scenario.slowest_step
    if scenario.delay_steps > round_steps:
        raise BadSettings(
            f"eager updates step with the mean of the round before; it takes {float(scenario.delay_steps):g} steps to arrive, "
            f"and a round takes {float(round_steps):g}",
            hint="lower --delay or raise --inner-steps",
        )
    return partial(train_eagerly, settings=_outer(scenario, nesterov=True))


def _outer(scenario: Scenario, *, nesterov: bool) -> DiLoCoSettings:
    outer = scenario.manifest.outer
    return DiLoCoSettings(outer.beta, outer.alpha, nesterov, scenario.clip, scenario.staleness_penalty)


PAIR_RULES: Final[dict[str, Callable[[OuterSection], PairRule]]] = {
    "noloco": lambda outer: NoLoCo(outer.alpha, outer.beta, outer.gamma),
    "noloco-averaged": lambda outer: NoLoCo(outer.alpha, outer.beta, outer.gamma, average_momentum=True),
    "slowmo": lambda outer: SlowMo(outer.alpha, outer.beta),  # whatever gamma is
    "gasloc": lambda outer: GASLoC(outer.alpha, outer.beta, outer.gamma),
}
METHODS: Final[dict[str, Method]] = {
    "noloco": pairs("noloco", alpha=0.0, beta=1.0, gamma=1.0),
    "noloco-averaged": pairs("noloco-averaged", alpha=0.5, beta=0.7, gamma=0.7),
    "slowmo": pairs("slowmo", alpha=0.5, beta=0.7, gamma=0.7),
    "gasloc": pairs("gasloc", alpha=0.5, beta=0.7, gamma=1.0),
    "diloco": group(nesterov=True, alpha=0.9, beta=0.7, codec="fp32"),
    "diloco-heavy-ball": group(nesterov=False, alpha=0.3, beta=0.7, codec="fp32"),
    "diloco-eager": Method(_eager, lambda _: {"alpha": 0.9, "beta": 0.7, "codec": "fp32"}, own_vectors=3, common_vectors=1),
    "sparseloco": group(nesterov=False, mean=every_coordinate, alpha=0.0, beta=1.0, codec="topk"),
    "streaming": Method(
        _streaming,
        lambda num_peers: {
            "alpha": 0.9,
            "beta": learning_rate_for(num_peers),
            "codec": "e3m0",
            "delay": Fraction(1),
            "blocks_per_fragment": 3,
        },
        common_vectors=3,
    ),
    "ddp": Method(lambda scenario, _: data_parallel, lambda _: {"codec": "fp32"}, common_vectors=1, one_replica=True),
    "local": Method(lambda scenario, _: train_alone, lambda _: {"codec": "fp32"}, at_own_rate=True, own_length=True),
}


def method(name: str) -> Method:
    """Return the method of that name. Raises BadSettings that names the nearest ones."""
    return METHODS[known(name, METHODS, "method")]
