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

from optim.diloco import DiLoCoSettings, StreamingSchedule, learning_rate_for, mean_gradient
from optim.noloco import PairRule
from peer.simulator.groups import GroupRule, Mean, data_parallel, every_coordinate, feedback_decay, train_eagerly, train_group
from peer.simulator.pairs import averaged_rule, gasloc_rule, gossip, noloco_rule, slowmo_rule, train_alone
from peer.simulator.population import Population, Size
from peer.simulator.scenario import Scenario, known
from protocol.errors import BadSettings
from protocol.run.manifest import Manifest

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


def pairs(rule: Callable[[Scenario], PairRule], **defaults: Any) -> Method:
    """Make a method of pairs."""
    mine = {"codec": PAIR_CODEC, **defaults}
    return Method(lambda scenario, _: partial(gossip, rule=rule(scenario)), lambda _: mine, own_vectors=2, at_own_rate=True)


def group(*, nesterov: bool, mean: Mean = mean_gradient, **defaults: Any) -> Method:
    """Make a method in which a group exchanges everything at once and waits."""

    def rule(scenario: Scenario, num_fragments: int) -> Train:
        everything = tuple(range(num_fragments))
        schedule = StreamingSchedule(1, scenario.period, 0)
        return partial(train_group, rule=GroupRule(schedule, (everything,), _outer(scenario, nesterov=nesterov), mean=mean))

    return Method(rule, lambda _: defaults, common_vectors=2)


def _streaming(scenario: Scenario, num_fragments: int) -> Train:
    inner_steps, overlap_steps = scenario.period, math.ceil(scenario.delay_steps / scenario.slowest_step)
    try:
        schedule = StreamingSchedule(num_fragments, inner_steps, overlap_steps)
    except ValueError as error:
        raise BadSettings(str(error), hint="lower --delay or raise --inner-steps") from None
    parts = tuple((fragment,) for fragment in range(num_fragments))
    return partial(train_group, rule=GroupRule(schedule, parts, _outer(scenario, nesterov=True), keep=scenario.keep_local))


def _streaming_defaults(num_peers: int) -> Mapping[str, Any]:
    return {"alpha": 0.9, "beta": learning_rate_for(num_peers), "codec": "e3m0", "delay": Fraction(1)}


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


METHODS: Final[dict[str, Method]] = {
    "noloco": pairs(noloco_rule, alpha=0.0, beta=1.0, gamma=1.0),
    "noloco-averaged": pairs(averaged_rule, alpha=0.5, beta=0.7, gamma=0.7),
    "slowmo": pairs(slowmo_rule, alpha=0.5, beta=0.7, gamma=0.7),
    "gasloc": pairs(gasloc_rule, alpha=0.5, beta=0.7, gamma=1.0),
    "diloco": group(nesterov=True, alpha=0.9, beta=0.7, codec="fp32"),
    "diloco-heavy-ball": group(nesterov=False, alpha=0.3, beta=0.7, codec="fp32"),
    "diloco-eager": Method(_eager, lambda _: {"alpha": 0.9, "beta": 0.7, "codec": "fp32"}, own_vectors=3, common_vectors=1),
    "sparseloco": group(nesterov=False, mean=every_coordinate, alpha=0.0, beta=1.0, codec="topk"),
    "streaming": Method(_streaming, _streaming_defaults, common_vectors=3),
    "ddp": Method(lambda scenario, _: data_parallel, lambda _: {"codec": "fp32"}, common_vectors=1, one_replica=True),
    "local": Method(lambda scenario, _: train_alone, lambda _: {"codec": "fp32"}, at_own_rate=True, own_length=True),
}


def method(name: str) -> Method:
    """Return the method of that name. Raises BadSettings that names the nearest ones."""
    return METHODS[known(name, METHODS, "method")]
