"""One meeting of two simulated peers over one fragment: the steps of a real meeting (peer/trainer/meeting.py), no network between them.

Snapshots are taken at each side's step boundary; then sketch, encode, gap on both sides, and the union of what did not decode; each side
applies the outcome at a step boundary of its own. Nothing here decides who meets, or when.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from torch import Tensor

from optim import merge
from optim.fragment_codec import FragmentCodec, FragmentEncoded
from peer.simulator.replicas import Layout, Replica
from peer.simulator.rules import PairRule
from peer.trainer.meeting import bounded_weight


@dataclass(slots=True)
class Outer:
    """One peer's slow weights, momentum and tokens since the last outer step, per fragment."""

    replica: Replica
    layout: Layout
    slow: list[Tensor] = field(init=False)
    momentum: list[Tensor] = field(init=False)
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.slow = [self.fast(fragment).clone() for fragment in range(len(self.layout.codecs))]
        self.momentum = [slow.new_zeros(slow.shape) for slow in self.slow]
        self.tokens = [0] * len(self.slow)

    def fast(self, fragment: int) -> Tensor:
        """Return the fragment's fast weights: a view."""
        return self.replica.weights[self.layout.slices[fragment]]

    def count_tokens(self, num_tokens: int) -> None:
        """Credit an inner step's tokens to every fragment."""
        self.tokens = [tokens + num_tokens for tokens in self.tokens]

    def solo(self, fragment: int, rule: PairRule) -> None:
        """Take the outer step of a fragment without a partner."""
        fast = self.fast(fragment)
        self.slow[fragment], self.momentum[fragment] = rule.solo_step(self.slow[fragment], self.momentum[fragment], fast)
        fast.copy_(self.slow[fragment])
        self.tokens[fragment] = 0


@dataclass(slots=True)
class Side:
    """What one side brings to a meeting, and what it takes home."""

    outer: Outer
    snapshot: Tensor
    tokens: int
    clock_steps: int
    weight: float = 0.5
    gap: Tensor | None = None
    applied: bool = False


@dataclass(slots=True)
class Pair:
    """A meeting. It is decided when both sides are open and the exchange has had its time."""

    fragment: int
    members: tuple[Outer, Outer]
    seed: int
    sides: dict[int, Side] = field(default_factory=dict)  # by peer number
    failed: Tensor | None = None  # bool[numel]: values to be taken alone, the same for both
    ready: Fraction | None = None  # when both sides have everything

    def open(self, outer: Outer) -> None:
        """Take this side's snapshot."""
        replica = outer.replica
        snapshot = outer.fast(self.fragment).clone()
        self.sides[replica.number] = Side(outer, snapshot, outer.tokens[self.fragment], replica.clock_steps)

    @property
    def is_open(self) -> bool:
        """Say whether both sides have taken their snapshots."""
        return len(self.sides) == 2

    def exchange(self, rule: PairRule, *, token_weights: bool) -> None:
        """Send each side's message to the other and decode it."""
        one, two = self.sides.values()
        if token_weights:
            one.weight, two.weight = bounded_weight(one.tokens, two.tokens), bounded_weight(two.tokens, one.tokens)
        codec = one.outer.layout.codecs[self.fragment]
        encoded = self._encoded(codec, [self._message(side, rule) for side in (one, two)])
        here, there = codec.gap(encoded[0], encoded[1].payload), codec.gap(encoded[1], encoded[0].payload)
        one.gap, two.gap = here.values, there.values
        self.failed = codec.failed_values(here.failed | there.failed)

    def _message(self, side: Side, rule: PairRule) -> Tensor:
        outer = side.outer
        return rule.message(outer.slow[self.fragment], outer.momentum[self.fragment], side.snapshot, side.weight)

    def _encoded(self, codec: FragmentCodec, messages: list[Tensor]) -> list[FragmentEncoded]:
        sketches = [codec.sketch(message, self.seed) for message in messages]
        return [codec.encode(message, self.seed, sketches[me], sketches[1 - me]) for me, message in enumerate(messages)]

    def apply(self, number: int, rule: PairRule) -> None:
        """Take one side's outer step; the inner steps made since its snapshot are kept."""
        side = self.sides[number]
        outer, fragment = side.outer, self.fragment
        assert side.gap is not None
        outer.slow[fragment], outer.momentum[fragment] = rule.pair_step(
            outer.slow[fragment], outer.momentum[fragment], side.snapshot, side.weight, side.gap, self.failed
        )
        fast = outer.fast(fragment)
        fast.copy_(merge.additive(outer.slow[fragment], fast, side.snapshot))
        outer.tokens[fragment] -= side.tokens
        outer.replica.hear_clock(next(other.clock_steps for peer, other in self.sides.items() if peer != number))
        side.applied = True
