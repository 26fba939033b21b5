"""The probe: what merging a partner's message would do to the loss on this peer's own text, and whether that is what honest peers do.

The loss of the same held-out sequences is measured with and without the merge, so the noise of the text cancels out. The sequences are
drawn anew for each meeting and nobody else knows the draw: a message that lowers the loss on all of them lowers it everywhere. A few are
measured first; only if their gain is low, more.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from gossamer.optim.fragments import Fragment, add
from gossamer.peer.model.computing import evaluating, token_losses
from gossamer.peer.text.labels import num_targets

FIRST_TOKENS: Final = 128  # to measure on, rounded to whole sequences, at least one
MORE_TOKENS: Final = 512  # beside these, where the first gain is low
SIGMAS: Final = 3.0  # of spread that a gain may lie below what is typical...
SLACK: Final = 0.01  # ...and than this, in standard deviations of the loss of single tokens, like the next one
MOST_SPREAD: Final = 0.03  # of honest gains, measured at FIRST_TOKENS (docs/log.md)
OWN_SPREAD: Final = 0.2  # of honest gains at least, in parts of what our own movement since the last outer step has gained
LOW: Final = 1.0  # spreads below what is typical: more is measured
MEDIAN_TO_SIGMA: Final = 1.48  # from the median of absolute deviations to a standard deviation
ENOUGH: Final = 8  # accepted gains, from which their own spread is known
CORRELATED: Final = 1.75  # the losses of neighbouring tokens are not independent: so much larger is the noise (measured)
COST_SHARE: Final = 0.015  # of the time of training, that probes may take
NEEDED: Final = 2.0
LEAST_SHARE: Final = 0.1  # of the messages that need no probe is probed whatever it costs
REMEMBERED: Final = 31  # accepted gains that say what is typical


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much a merge lowers the loss on own text, nats per token."""

    value: float
    noise: float  # standard error
    scale: float  # standard deviation of the loss of single tokens: what a loss is measured against, whatever its unit
    num_tokens: int

    @classmethod
    def of(cls, before: Tensor, after: Tensor) -> Gain:
        """Return the gain from the loss of each token, f32[tokens], without and with the merge."""
        gains, num_tokens = before - after, before.numel()
        noise = CORRELATED * float(gains.std()) / math.sqrt(num_tokens) if num_tokens > 1 else math.inf
        return cls(float(gains.mean()), noise, float(before.std() if num_tokens > 1 else before.abs()), num_tokens)


class Probe(ABC):
    """Measures what merges do to the loss on this peer's own held-out data, while nobody changes its weights. One thread at a time."""

    runs_beside: bool  # on any thread while the weights are only read; else on the trainer's thread alone, at a step boundary
    most_share: float = math.inf  # of the time of training so far, that all measurements together may take
    expected_s: float = 0.0  # for the first of them

    def judge(self, gate: ProbeGate, fragment: Fragment, shifts: Shifts, part: float, *, is_behind: bool) -> Judgement:
        """Measure what a merge does to the loss that the outer step without a partner leaves, and have the gate judge it.

        Where the first gain is low, it is measured on more data. Where it is low there too, this part of the merge is measured, half of it
        if that is low, and what our own movement has gained. `is_behind`: the merge leads back along our own way.
        """
        for data in self.draw():
            before = self.losses(fragment, shifts.solo, data)
            if not bool(before.isfinite().all()):  # our own weights are bad: whatever a partner sends is no evidence
                return Judgement(Gain(0.0, 0.0, 0.0, before.numel()), "", 1.0, math.nan)
            whole = self.gain(before, self.losses(fragment, shifts.pair, data))
            if not gate.is_low(whole):
                return gate.judge(whole, None, is_behind=is_behind)
        own = -self.gain(before, self.losses(fragment, -shifts.own, data)).value
        for smaller in (part, part / 2):
            closer = Closer(smaller, self.gain(before, self.losses(fragment, shifts.solo.lerp(shifts.pair, smaller), data)), own)
            if not gate.is_low(closer.gain, max(0.0, own)):
                break
        return gate.judge(whole, closer, is_behind=is_behind)

    @abstractmethod
    def draw(self) -> Sequence[Tensor]:
        """Return the data of one judgement: first a little, then more."""

    @abstractmethod
    def losses(self, fragment: Fragment, shift: Tensor, data: Tensor) -> Tensor:
        """Return the loss of each part of the data, f32[parts], with a fragment shifted by f32[numel]."""

    @abstractmethod
    def gain(self, before: Tensor, after: Tensor) -> Gain:
        """Return the gain from the losses without and with the merge."""


class TokenProbe(Probe):
    """Measures a language model on sequences of its own: the loss of each token that trains.

    `pool`, int64[N, L+1], marked, lies on the model's device. No partner may foretell `rng`.
    """

    runs_beside = True

    def __init__(self, model: nn.Module, dtype: torch.dtype, pool: Tensor, rng: random.Random) -> None:
        self._dtype = dtype
        self._pool = pool
        self._num_targets = max(1, int(num_targets(pool)) // len(pool))  # of a sequence, on average
        self._rng = rng
        # `data`, not `detach()`: a gradient that is being computed is not to see that a twin was written to
        twins = {id(p): nn.Parameter(p.data, requires_grad=False) for p in model.parameters()}
        self._model = copy.deepcopy(model, memo=dict(twins))  # apart from the model in training, which may be computing on another thread
        self._twins = {name: (p, twins[id(p)]) for name, p in model.named_parameters()}

    def draw(self) -> Sequence[Tensor]:
        """Draw sequences, int64[n, L+1]: FIRST_TOKENS, and MORE_TOKENS beside these."""
        first, more = (max(1, num_tokens // self._num_targets) for num_tokens in (FIRST_TOKENS, MORE_TOKENS))
        drawn = self._pool[self._rng.sample(range(len(self._pool)), min(len(self._pool), first + more))]
        return drawn[:first], drawn

    def losses(self, fragment: Fragment, shift: Tensor, data: Tensor) -> Tensor:
        """Return the loss of each token."""
        moved = {piece.name: self._twins[piece.name][1] for piece in fragment.pieces}
        with evaluating(self._model):
            self._share_memory()
            for twin in moved.values():
                twin.data = twin.data.clone()
            add(fragment, shift, moved)
            losses = token_losses(self._model, data, self._dtype)
            self._share_memory()  # frees the copies
        return losses

    def gain(self, before: Tensor, after: Tensor) -> Gain:
        """Return the gain from the loss of each token."""
        return Gain.of(before, after)

    def _share_memory(self) -> None:
        for live, twin in self._twins.values():
            twin.data = live.data


class ProbeCost:
    """The processor time of one peer's probes, which limits how many of the meetings that need none are probed.

    Nothing is probed where probes would take more than `most_share` of the time of the inner steps, and what must be probed is not where
    they would take more than NEEDED times as much. `now_s`: the clock by which a probe costs; `expected_s`: what the first will cost.
    """

    def __init__(self, most_share: float = math.inf, now_s: Callable[[], float] = time.thread_time, expected_s: float = 0.0) -> None:
        self._most_share = most_share
        self._expected_s = expected_s
        self._now_s = now_s
        self._num_probes = 0
        self._probes_s = 0.0
        self._num_needed = 0  # messages that had to be probed
        self._num_asked = 0  # others

    @classmethod
    def of(cls, probe: Probe | None) -> ProbeCost:
        """Return the cost of a probe: by the clock, and within its share, where it stops the program."""
        return cls() if probe is None or probe.runs_beside else cls(probe.most_share, time.monotonic, probe.expected_s)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time inside as a probe."""
        start_s = self._now_s()
        try:
            yield
        finally:
            self._num_probes += 1
            self._probes_s += self._now_s() - start_s

    @property
    def blocking_s(self) -> float:
        """The time for which probes have stopped the program: it does not depend on how often peers meet."""
        return 0.0 if math.isinf(self._most_share) else self._probes_s

    def is_affordable(self, computing_s: float, *, is_needed: bool) -> bool:
        """Return whether there is time for another probe. `computing_s`: the time spent in inner steps so far."""
        most_share = self._most_share * (NEEDED if is_needed else 1.0)
        next_s = self._probes_s / self._num_probes if self._num_probes else self._expected_s
        return math.isinf(most_share) or self._probes_s + next_s <= most_share * computing_s

    def is_drawn(self, *, must_probe: bool, computing_s: float, rng: random.Random) -> bool:
        """Return whether a message is probed; asked once for each. `computing_s`: the time spent in inner steps so far."""
        if must_probe:
            self._num_needed += 1
            return self.is_affordable(computing_s, is_needed=True)
        self._num_asked += 1
        if not self.is_affordable(computing_s, is_needed=False):
            return False
        return rng.random() < self._affordable_share(computing_s)

    def _affordable_share(self, computing_s: float) -> float:
        """Return the share of the messages that need no probe for which there is time beside those that do."""
        if not self._probes_s:
            return 1.0
        num_affordable = COST_SHARE * computing_s * self._num_probes / self._probes_s - self._num_needed
        return max(LEAST_SHARE, num_affordable / self._num_asked)


@dataclass(frozen=True, slots=True)
class Shifts:
    """Where a meeting may move a fragment's fast weights, f32[numel] each, on the model's device."""

    pair: Tensor  # by the outer step with the partner
    solo: Tensor  # by the outer step without one
    own: Tensor  # where our own training since the last outer step has moved them


@dataclass(frozen=True, slots=True)
class Closer:
    """What is measured beside a low gain."""

    part: float  # a smaller part of the merge...
    gain: Gain  # ...and its gain
    own: float  # gain of our own movement since the last outer step, nats per token


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the gate says of a gain."""

    gain: Gain
    reason: str  # why the merge is harmful; empty if it is not
    part: float  # of the merge that is of use: all, a smaller part, or none: then only the partner profits
    deviation: float  # of the gain from what is typical, in spreads of honest gains; negative: the merge is worse
    least: float = -math.inf  # as which a lower gain is remembered

    @property
    def is_evidence(self) -> bool:
        """Whether it tells anything about the partner: not if the partner is behind and nothing is merged."""
        return math.isfinite(self.deviation) and not self.part == 0.0 == self.deviation


class ProbeGate:
    """Judges gains by what is typical of this peer's accepted meetings. Scalars only.

    The measure is the spread of honest gains, and never the noise of the gain itself, which is in the partner's hand.
    """

    def __init__(self) -> None:
        self._gains: deque[tuple[float, float, int]] = deque(maxlen=REMEMBERED)  # accepted: value, noise, tokens

    def is_low(self, gain: Gain, own: float = 0.0) -> bool:
        """Return whether a gain is low enough to measure more. `own`: what our own movement has gained, if that is measured."""
        return not self._deviation(gain, own) >= -LOW

    def judge(self, gain: Gain, closer: Closer | None, *, is_behind: bool) -> Judgement:
        """Judge the gain of a merge, by what was measured beside it (None: nothing). Changes nothing.

        A message is harmful if a smaller part of it is so too: right after we have merged, the whole of an honest one may lead too far. A
        partner that is behind costs what we are ahead of it, and does no harm by that: it may follow us, and we do not go back. While we
        learn fast, the gains of honest partners differ by parts of what we have learned alone.
        """
        own = max(0.0, closer.own) if closer else 0.0
        deviation = self._deviation(gain, own)
        if not math.isfinite(deviation):
            return Judgement(gain, "the loss on our data would not be finite", 0.0, -math.inf)
        if closer is None or not self.is_low(gain, own):
            return Judgement(gain, "", 1.0, deviation)
        least = min(0.0, self._typical(gain)) - SLACK * gain.scale - SIGMAS * self._spread(gain, own)
        best = closer.gain if closer.gain.value > gain.value else gain
        deviation = self._deviation(best, own)
        if best.value < least and not is_behind:
            reason = f"it would raise the loss on our data by {-gain.value:.3g}, and honest messages by {-least:.3g} at most"
            return Judgement(gain, reason, 0.0, deviation)
        part = 0.0 if self.is_low(closer.gain, own) else closer.part
        return Judgement(best, "", part, 0.0 if is_behind else deviation, least)

    def is_of_use(self, gain: Gain) -> bool:
        """Return whether a merge helps, so that the whole of a gap is merged that is longer than training explains."""
        return gain.value > 0.0

    def accept(self, judgement: Judgement) -> None:
        """Remember the gain of a merge that counts."""
        gain = judgement.gain
        if not math.isfinite(judgement.deviation):
            return
        self._gains.append((max(gain.value, judgement.least), gain.noise, gain.num_tokens))

    def _typical(self, gain: Gain) -> float:
        """Return the typical gain, within bounds.

        A gain is never low because others helped much more: a peer that is behind gains much by each merge. And partners that harm a little
        each time must not shift what is typical without end.
        """
        median = statistics.median(value for value, _, _ in self._gains) if self._gains else 0.0
        return min(SLACK * gain.scale, max(-MOST_SPREAD * gain.scale, median))

    def _deviation(self, gain: Gain, own: float) -> float:
        return (gain.value - self._typical(gain)) / max(1e-9, self._spread(gain, own))

    def _spread(self, gain: Gain, own: float) -> float:
        """Return the standard deviation of honest gains measured on as many tokens: of the gains themselves, and of their noise."""
        return max(OWN_SPREAD * own, self._usual_spread(gain))

    def _usual_spread(self, gain: Gain) -> float:
        most = MOST_SPREAD * gain.scale
        if len(self._gains) < ENOUGH:
            return most
        typical, noise, num_tokens = (statistics.median(each) for each in zip(*self._gains, strict=True))
        whole = MEDIAN_TO_SIGMA * statistics.median(abs(value - typical) for value, _, _ in self._gains)
        true = math.sqrt(max(0.0, whole**2 - noise**2))
        return min(most, math.hypot(true, noise * math.sqrt(num_tokens / gain.num_tokens)))

    def state(self) -> list[list[float]]:
        """Return the state for a checkpoint, JSON-able."""
        return [list(gain) for gain in self._gains]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Restore what `state` returned."""
        self._gains = deque(((value, noise, int(num_tokens)) for value, noise, num_tokens in state), REMEMBERED)
