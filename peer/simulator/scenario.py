"""A scenario: the manifest of real peers, the simulated conditions of their network, and the times at which each peer steps.

Virtual time is rational and exact, so that peers of equal speed arrive together. One unit is one inner step at mean speed, so a swarm
trains on about the same number of tokens at any speeds. Absences depend on the seed, the peer and the period.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random
from typing import Final

from gossamer.optim.inner import InnerSettings
from gossamer.optim.names import suggestion
from gossamer.peer.model.plan import inner_settings
from gossamer.peer.simulator.attacks import ATTACKS
from gossamer.peer.simulator.hop_attacks import DRIVER_ATTACKS, HOP_ATTACKS
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest
from gossamer.protocol.run.sections import AUTO_STEPS

NUM_PEERS: Final = 8
ON_DEMAND: Final = "on-demand"
SCHEDULED: Final = "scheduled"
RANDOM: Final = "random"
FIXED: Final = "fixed"
NO_CHECKS, LENGTH_CHECKS, ALL_CHECKS = HOP_CHECKS = ("none", "length", "all")  # all: some micro-batches are doubled, too


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulation; `manifest.run.total_steps` is the mean per peer. Raises BadSettings for impossible combinations."""

    manifest: Manifest
    num_peers: int = NUM_PEERS
    speeds: tuple[Fraction, ...] = (Fraction(1),)  # relative step rates, repeated until every peer has one
    delay_steps: Fraction = Fraction(0)  # how long an exchange takes, in units of virtual time
    line_mbit: float = 100.0  # each way, of every peer; bounds the interval where inner_steps is auto
    step_s: float = 1.0  # of an inner step at mean speed, for the same bound
    auto_steps: int = AUTO_STEPS  # the resulting interval
    matching: str = ON_DEMAND
    token_weights: bool = True
    drop_out: float = 0.0  # probability that a peer is away for a period of inner_steps; 0 in the first period
    skew: float = 0.0  # share of each batch that comes from the peer's own part of the text
    keep_local: float = 0.5  # streaming: share of the local weights that a merge keeps
    clip: float = math.inf  # group methods: bound of the momentum, in root mean squares of the mean pseudo-gradient (CO2)
    staleness_penalty: float = 1.0  # group methods: divides pseudo-gradients (CO2)
    attack: str = ""  # on-demand pairs: what the last `attackers` peers do (attacks.py)
    attackers: int = 0
    attack_from: Fraction = Fraction(1, 2)  # of the run, before they turn
    feedback: float | None = None  # group methods: decay of the error feedback; None: the codec's default
    routing: str = RANDOM  # staged runs: which replica's stage a micro-batch takes next; fixed: always those of one replica
    hop_delay: int = 0  # staged runs: how many inner steps a gradient takes from a stage to the one before
    attack_stage: int = 0  # staged runs: whose answers the attackers craft, counted from one; 1: what drivers send; 0: the last stage
    hop_checks: str = ALL_CHECKS  # staged runs: what holders do about what they receive

    def __post_init__(self) -> None:
        _need(self.num_peers >= 1, f"peers must be at least 1, and is {self.num_peers}")
        _need(bool(self.speeds) and min(self.speeds) > 0, "speeds must all be above 0")
        _need(len(self.speeds) <= self.num_peers, f"there are {len(self.speeds)} speeds for {self.num_peers} peers")
        _need(self.delay_steps >= 0, f"delay must not be negative, and is {float(self.delay_steps):g}")
        _need(self.matching in (ON_DEMAND, SCHEDULED), f"matching is {self.matching!r}; it can be {ON_DEMAND} or {SCHEDULED}")
        _need(0.0 < self.line_mbit < math.inf, f"--bandwidth must be above 0, and is {self.line_mbit:g}")
        _need(0.0 < self.step_s < math.inf, f"--step-seconds must be above 0, and is {self.step_s:g}")
        _need(0.0 <= self.drop_out < 1.0, f"drop_out must satisfy 0 <= drop_out < 1, and is {self.drop_out:g}")
        _need(0 <= self.attackers < self.num_peers, f"attackers must leave an honest peer, and are {self.attackers} of {self.num_peers}")
        _need(bool(self.attack) == bool(self.attackers), "an attack needs attackers, and these an attack: --attack NAME --attackers N")
        _need(not self.attack or self.matching == ON_DEMAND, f"an attack needs matching {ON_DEMAND}")
        _need(0 <= self.attack_from <= 1, f"attack_from must lie in [0, 1], and is {float(self.attack_from):g}")
        _need(self.clip > 0.0, f"clip must be above 0, and is {self.clip:g}")
        _need(self.staleness_penalty >= 1.0, f"staleness_penalty must be at least 1, and is {self.staleness_penalty:g}")
        for name, share in (("skew", self.skew), ("keep_local", self.keep_local), ("feedback", self.feedback or 0.0)):
            _need(0.0 <= share <= 1.0, f"{name} must lie in [0, 1], and is {share:g}")
        _need(self.routing in (RANDOM, FIXED), f"routing is {self.routing!r}; it can be {RANDOM} or {FIXED}")
        _need(self.hop_delay >= 0, f"hop_delay must not be negative, and is {self.hop_delay}")
        _need(self.manifest.num_stages == 1 or len(set(self.speeds)) == 1, "in a staged run all peers have the same speed")
        is_staged = self.manifest.num_stages > 1
        _need(self.hop_checks in HOP_CHECKS, f"hop_checks is {self.hop_checks!r}; it can be {', '.join(HOP_CHECKS)}")
        _need(not (is_staged and self.attack and self.hop_delay), "an attack on a staged run needs hop_delay 0")
        num_stages = self.manifest.num_stages
        _need(0 <= self.attack_stage <= num_stages, f"attack_stage must be 1 to {num_stages}, and is {self.attack_stage}")
        if self.attack:
            of_stages = ("attack of a driver", DRIVER_ATTACKS) if self.attack_stage == 1 else ("attack on a staged run", HOP_ATTACKS)
            kind, attacks = of_stages if is_staged else ("attack", ATTACKS)
            known(self.attack, attacks, kind)

    @property
    def num_honest(self) -> int:
        """Return the number of peers that are not attackers: the first ones."""
        return self.num_peers - self.attackers

    @property
    def rates(self) -> tuple[Fraction, ...]:
        """Return each peer's inner steps per unit of virtual time; their mean is 1."""
        given = [self.speeds[number % len(self.speeds)] for number in range(self.num_peers)]
        return tuple(self.num_peers * speed / sum(given) for speed in given)

    @property
    def slowest_step(self) -> Fraction:
        """Return the duration of a step when all wait for the slowest peer, in units of virtual time."""
        return 1 / min(self.rates)

    @property
    def seed(self) -> int:
        """Return the seed of all randomness."""
        return self.manifest.run.seed

    @property
    def num_steps(self) -> int:
        """Return the mean number of inner steps per peer."""
        return self.manifest.run.total_steps

    @property
    def period(self) -> int:
        """Return the inner steps between two exchanges of a fragment; also the duration of an absence in virtual time."""
        inner_steps = self.manifest.outer.inner_steps
        return self.auto_steps if isinstance(inner_steps, str) else inner_steps

    @property
    def step_tokens(self) -> int:
        """Return the number of tokens that one inner step of one peer predicts."""
        return self.manifest.inner.batch_size * self.manifest.inner.sequence_length

    def inner_settings_at(self, rate: Fraction) -> InnerSettings:
        """Return the inner settings of a peer whose schedule lasts as long as the run at this rate."""
        return replace(inner_settings(self.manifest), total_steps=math.ceil(self.num_steps * rate))

    def is_away(self, peer: int, now: Fraction | int) -> bool:
        """Return whether the peer is away at this time."""
        number = math.floor(now / self.period)
        return number > 0 and self.drop_out > 0.0 and Random(f"{self.seed}/away/{peer}/{number}").random() < self.drop_out

    def steps_at_own_rates(self) -> Iterator[tuple[Fraction, list[int]]]:
        """Yield each time at which inner steps end, in order, with the peers whose steps end then; absences begin between steps."""
        rates = self.rates
        queue = [(1 / rate, peer) for peer, rate in enumerate(rates)]
        heapq.heapify(queue)
        while queue and queue[0][0] <= self.num_steps:
            now = queue[0][0]
            peers = []
            while queue and queue[0][0] == now:
                peers.append(heapq.heappop(queue)[1])
            yield now, peers
            for peer in peers:
                heapq.heappush(queue, (self._return_time(peer, now) + 1 / rates[peer], peer))

    def steps_together(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each step's number, from 1 on, and the peers that take it: those present when it begins, counted in steps of the group."""
        for step in range(1, self.num_steps + 1):
            yield step, [peer for peer in range(self.num_peers) if not self.is_away(peer, step - 1)]

    def _return_time(self, peer: int, now: Fraction) -> Fraction:
        while self.is_away(peer, now):
            now = Fraction((math.floor(now / self.period) + 1) * self.period)
        return now


def known(name: str, names: Iterable[str], kind: str) -> str:
    """Return a name if it is one of `names`. Raises BadSettings with a suggestion if not."""
    table = list(names)
    if name in table:
        return name
    raise BadSettings(f"there is no {kind} named {name!r}", hint=suggestion(name, table))


def _need(holds: bool, sentence: str) -> None:
    if not holds:
        raise BadSettings(sentence, hint="`peer simulate --help` says what each option takes")
