"""What a simulation is told: the manifest that real peers would get, and what a network would add to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from optim.inner import InnerSettings
from peer.model.plan import inner_settings
from protocol.errors import BadSettings
from protocol.run.manifest import Manifest

NUM_PEERS: Final = 8
ON_DEMAND: Final = "on-demand"
SCHEDULED: Final = "scheduled"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulation. `manifest.run.total_steps` is the mean number of inner steps per peer.

    One unit of virtual time is one inner step at mean speed, so a swarm trains on about equally many tokens whatever its speeds are.
    Raises BadSettings for values that make no sense together.
    """

    manifest: Manifest
    num_peers: int = NUM_PEERS
    speeds: tuple[Fraction, ...] = (Fraction(1),)  # relative step rates, repeated until every peer has one
    delay_steps: Fraction = Fraction(0)  # how long an exchange takes, in units of virtual time
    matching: str = ON_DEMAND
    token_weights: bool = True
    drop_out: float = 0.0  # chance that a peer is away for a period of inner_steps
    skew: float = 0.0  # share of each batch that comes from the peer's own part of the text
    keep_local: float = 0.5  # streaming: share of the local weights that a merge keeps
    clip: float = math.inf  # group methods: bound of the momentum, in root mean squares of the mean pseudo-gradient (CO2)
    staleness_penalty: float = 1.0  # group methods: divides pseudo-gradients (CO2)
    feedback: float | None = None  # group methods: decay of the error feedback; None: what the codec needs

    def __post_init__(self) -> None:
        _need(self.num_peers >= 1, f"a simulation of {self.num_peers} peers has nobody to train")
        _need(bool(self.speeds) and min(self.speeds) > 0, "speeds must all be above 0")
        _need(len(self.speeds) <= self.num_peers, f"there are {len(self.speeds)} speeds for {self.num_peers} peers")
        _need(self.delay_steps >= 0, f"delay must not be negative, and is {float(self.delay_steps):g}")
        _need(self.matching in (ON_DEMAND, SCHEDULED), f"matching is {self.matching!r}; it can be {ON_DEMAND} or {SCHEDULED}")
        _need(0.0 <= self.drop_out < 1.0, f"drop_out must satisfy 0 <= drop_out < 1, and is {self.drop_out:g}")
        _need(self.clip > 0.0, f"clip must be above 0, and is {self.clip:g}")
        _need(self.staleness_penalty >= 1.0, f"staleness_penalty must be at least 1, and is {self.staleness_penalty:g}")
        for name, share in (("skew", self.skew), ("keep_local", self.keep_local), ("feedback", self.feedback or 0.0)):
            _need(0.0 <= share <= 1.0, f"{name} must lie in [0, 1], and is {share:g}")

    @property
    def rates(self) -> tuple[Fraction, ...]:
        """Return each peer's inner steps per unit of virtual time; their mean is 1."""
        given = [self.speeds[number % len(self.speeds)] for number in range(self.num_peers)]
        return tuple(self.num_peers * speed / sum(given) for speed in given)

    @property
    def seed(self) -> int:
        """Return what everything random follows from."""
        return self.manifest.run.seed

    @property
    def num_steps(self) -> int:
        """Return the mean number of inner steps per peer."""
        return self.manifest.run.total_steps

    @property
    def step_tokens(self) -> int:
        """Return the tokens that one inner step of one peer predicts."""
        return self.manifest.inner.batch_size * self.manifest.inner.sequence_length

    def inner(self, rate: Fraction) -> InnerSettings:
        """Return the inner settings of a peer whose schedule lasts as long as the run does at this rate."""
        return replace(inner_settings(self.manifest), total_steps=math.ceil(self.num_steps * rate))


def _need(holds: bool, sentence: str) -> None:
    if not holds:
        raise BadSettings(sentence, hint="`peer simulate --help` says what each option takes")
