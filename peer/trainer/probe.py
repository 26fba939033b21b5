"""The probe: what merging a partner's message would do to the loss on this peer's own text, and whether that is what honest peers do.

The loss of the same few sequences is measured with and without the merge, so the noise of the batch cancels out. The sequences are those of
this peer's next batch: nobody else knows them, and the weights have not been trained on them.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from gossamer.optim.fragments import Fragment, add
from gossamer.peer.model.computing import evaluating, token_losses

PROBE_TOKENS: Final = 256  # at most, rounded to whole sequences, at least one
SIGMAS: Final = 3.0  # of spread that a gain may be worse than...
SLACK: Final = 0.01  # ...what is typical, and than this, in standard deviations of the loss of single tokens, like the next one
MOST_SPREAD: Final = 0.03  # of honest gains: it was measured at 128 tokens; docs/log.md
MEAN_TO_SIGMA: Final = 1.48  # from the median of absolute deviations to a standard deviation
ENOUGH: Final = 8  # accepted gains, from which their own spread is known
CORRELATED: Final = 1.75  # the losses of neighbouring tokens are not independent: so much larger is the noise
COST_SHARE: Final = 0.015  # of the time of training, that probes of partners with a good record may take
LEAST_SHARE: Final = 0.1  # of the meetings is probed whatever it costs
REMEMBERED: Final = 31  # accepted gains that say what is typical


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much a merge lowers the loss on own text, nats per token."""

    value: float
    noise: float  # standard error
    scale: float  # standard deviation of the loss of single tokens: what a loss is measured against, whatever its unit


class Probe:
    """Measures merges of one model, while nobody changes its weights. One thread at a time."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        twins = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
        self._model = copy.deepcopy(model, memo=dict(twins))  # apart from the model in training, which may be computing on another thread
        self._twins = {name: (p, twins[id(p)]) for name, p in model.named_parameters()}

    def gain(self, fragment: Fragment, shift: Tensor, sequences: Tensor) -> Gain:
        """Measure what adding `shift`, f32[numel], to a fragment does to the loss of some sequences, int64[B, L+1]."""
        with evaluating(self._model):
            for live, twin in self._twins.values():
                twin.data = live.data  # the same memory
            before = token_losses(self._model, sequences, self._dtype)
            moved = {piece.name: self._twins[piece.name][1] for piece in fragment.pieces}
            for twin in moved.values():
                twin.data = twin.data.clone()
            add(fragment, shift, moved)
            after = token_losses(self._model, sequences, self._dtype)
            for live, twin in self._twins.values():
                twin.data = live.data  # frees the copies
        gains, num_tokens = before - after, before.numel()
        noise = CORRELATED * float(gains.std()) / math.sqrt(num_tokens) if num_tokens > 1 else math.inf
        return Gain(float(gains.mean()), noise, float(before.std()))


def probe_sequences(batch: Tensor, rng: random.Random) -> Tensor:
    """Choose the sequences of a batch, int64[B, L+1], on which a merge is measured: a partner may know the batch, but not the choice."""
    return batch[rng.sample(range(len(batch)), min(len(batch), max(1, PROBE_TOKENS // (batch.shape[1] - 1))))]


class ProbeCost:
    """The processor time of one peer's probes, which limits how many of the meetings that need none are probed."""

    def __init__(self) -> None:
        self._num_probes = 0
        self._probes_s = 0.0
        self._num_asked = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time inside as a probe."""
        start_s = time.thread_time()
        try:
            yield
        finally:
            self._num_probes += 1
            self._probes_s += time.thread_time() - start_s

    def affordable_share(self, train_s: float) -> float:
        """Return the share of meetings that may be probed, asked once for each; `train_s`: the time spent in training so far."""
        self._num_asked += 1
        if not self._probes_s:
            return 1.0
        return min(1.0, max(LEAST_SHARE, COST_SHARE * train_s / self._num_asked * self._num_probes / self._probes_s))


class ProbeGate:
    """Judges gains by what is typical of this peer's accepted meetings. Scalars only."""

    def __init__(self) -> None:
        self._gains: deque[float] = deque(maxlen=REMEMBERED)

    def judge(self, gain: Gain) -> str:
        """Return why a merge with this gain is harmful; empty if it is not. An accepted gain is remembered.

        A gain is measured by the spread of honest gains, for its own noise is in the partner's hand.
        """
        if not math.isfinite(gain.value):
            return "the loss on our text would not be finite"
        typical = statistics.median(self._gains) if self._gains else 0.0
        spread = MOST_SPREAD * gain.scale
        if len(self._gains) >= ENOUGH:
            spread = min(spread, MEAN_TO_SIGMA * statistics.median(abs(other - typical) for other in self._gains))
        least = min(0.0, typical) - SLACK * gain.scale - SIGMAS * min(spread, gain.noise)
        if gain.value < least:
            return (
                f"it would raise the loss on our text by {-gain.value:.3g} nats per token; honest messages raise it by {-least:.3g} at most"
            )
        self._gains.append(gain.value)
        return ""

    def state(self) -> list[float]:
        """Return the state for a checkpoint, JSON-able."""
        return list(self._gains)

    def restore(self, state: list[float]) -> None:
        """Restore what `state` returned."""
        self._gains = deque(state, REMEMBERED)
