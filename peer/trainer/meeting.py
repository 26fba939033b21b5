"""One side of one meeting over one fragment, as tensors: message, sketch, encode, gap, gate, step, merge.

The only place where a meeting is computed. Real peers (outer_loop.py) add the link's requests, files and a lock; simulated ones
(peer/simulator/pairs.py) hand one side's tensors straight to the other. Between the snapshot and the merge everything here reads the
fragment and writes only to the meeting: slow weights and momentum stand still while a meeting is open, and the fast weights are in the
snapshot. So all of that may run on a second thread, beside the inner steps; snapshot and merge need a step boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optim.codecs import Gap
from optim.fragment_codec import FragmentCodec, FragmentEncoded
from optim.fragments import add, gather
from optim.noloco import PairRule, token_weight
from peer.trainer.merge_gate import Lengths, MergeGate

MAX_TOKEN_RATIO = 16  # more than the speeds of peers that train together differ by
SLAB_VALUES = 1 << 15  # 128 KiB: what one operation leaves in the processor's cache, the next one finds there


@dataclass(frozen=True, slots=True)
class OuterStep:
    """A fragment's next slow weights and momentum, and what to add to its fast weights."""

    slow: Tensor  # f32[numel]
    momentum: Tensor  # f32[numel]
    shift: Tensor  # f32[numel]


@dataclass(frozen=True, slots=True)
class Since:
    """What has happened since a fragment's last outer step."""

    tokens: int = 0  # trained
    steps: int = 0  # inner steps
    missed_steps: int = 0  # of the schedule clock, which ran on without inner steps of ours

    def __sub__(self, earlier: Since) -> Since:
        return Since(self.tokens - earlier.tokens, self.steps - earlier.steps, self.missed_steps - earlier.missed_steps)

    def moved(self, length: float) -> float:
        """Return how long a movement would be with the missed steps."""
        return length * (1.0 + self.missed_steps / max(1, self.steps))


class FragmentState:
    """One fragment of a replica between meetings. `parameters` are the model's own tensors, by name, and are written to."""

    def __init__(self, codec: FragmentCodec, parameters: Mapping[str, Tensor], has_momentum: bool = True) -> None:
        self.codec = codec
        self.has_momentum = has_momentum
        self.slow = gather(codec.fragment, parameters)  # f32[numel]
        nothing = self.slow.new_zeros(()).expand(self.slow.shape)  # one zero, seen as many: a run without momentum keeps none
        self.momentum = nothing.clone() if has_momentum else nothing
        self.gate = MergeGate()
        self.since = Since()
        self.meeting: int | None = None
        self._parameters = parameters

    @property
    def tokens(self) -> int:
        """Return the tokens trained since the last outer step."""
        return self.since.tokens

    def count(self, num_tokens: int) -> None:
        """Count an inner step."""
        since = self.since
        self.since = Since(since.tokens + num_tokens, since.steps + 1, since.missed_steps)

    def miss(self, num_steps: int) -> None:
        """Hear that the schedule clock went on by so many steps that were not ours."""
        self.since = replace(self.since, missed_steps=self.since.missed_steps + num_steps)

    def replace(self, slow: Tensor, momentum: Tensor) -> None:
        """Take over others' slow weights and momentum, and forget what led to our own; the fast weights are the caller's affair."""
        self.slow, self.momentum, self.since, self.gate = slow, momentum, Since(), MergeGate()

    def fast(self) -> Tensor:
        """Return the fast weights: a new f32[numel]."""
        return gather(self.codec.fragment, self._parameters)

    def step_alone(self, rule: PairRule) -> None:
        """Take the outer step without a partner."""
        fast = self.fast()
        self.gate.step_alone(self.since.moved(_length(fast - self.slow)))
        self.merge(self.in_slabs(fast, lambda part: rule.solo_step(self.slow[part], self.momentum[part], fast[part])), self.since)

    def merge(self, step: OuterStep, since: Since) -> None:
        """Make an outer step count that was computed from what had happened till then; all or nothing, for nothing is allocated."""
        add(self.codec.fragment, step.shift, self._parameters)
        self.slow, self.momentum = step.slow, step.momentum
        self.since -= since

    def in_slabs(self, snapshot: Tensor, step: Callable[[slice], tuple[Tensor, Tensor]]) -> OuterStep:
        """Compute an outer step from a snapshot of the fast weights, slab by slab; `step` returns a slab's slow weights and momentum."""
        slow, shift = torch.empty_like(self.slow), torch.empty_like(self.slow)
        momentum = torch.empty_like(self.slow) if self.has_momentum else self.momentum
        size = SLAB_VALUES if slow.device.type == "cpu" else slow.numel()  # in one part on other devices
        for start in range(0, slow.numel(), size):
            part = slice(start, start + size)
            slow[part], new_momentum = step(part)
            if self.has_momentum:
                momentum[part] = new_momentum
            torch.sub(slow[part], snapshot[part], out=shift[part])
        return OuterStep(slow, momentum, shift)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A partner's message that passed the gate, with the lengths by which it was judged."""

    gap: Gap
    gap_length: float
    own: Lengths


class MeetingSide:
    """One side of a meeting: `prepare`, `encode`, `judge`, `step`, `merge`, in this order; made with the snapshot.

    Sketches, payloads and bitmaps of failed blocks lie on the fragment's device. Raises ValueError for what is out of turn, and where the
    codec does: for values that are no weights any more, a sketch that no honest partner sends, a bitmap of another size. Then nothing has
    changed.
    """

    _rule: PairRule  # these from `prepare` on
    _weight: float
    _seed: int
    _sketch: Tensor

    def __init__(self, state: FragmentState) -> None:
        self.state = state
        self.snapshot = state.fast()  # f32[numel]
        self.since = state.since  # behind the snapshot
        self._message: Tensor | None = None
        self._encoded: FragmentEncoded | None = None
        self._accepted: Accepted | None = None

    def prepare(self, rule: PairRule, weight: float, seed: int) -> Tensor:
        """Form the message and return its sketch, uint8[sketch_bytes]; both sides must pass the same seed."""
        state = self.state
        message = rule.message(state.slow, state.momentum, self.snapshot, weight)
        self._sketch = state.codec.sketch(message, seed)
        self._rule, self._weight, self._seed, self._message = rule, weight, seed, message
        return self._sketch

    def encode(self, partner_sketch: Tensor) -> Tensor:
        """Code the message against both sketches and return the payload, uint8[payload_bytes]."""
        if self._message is None or self._encoded is not None:
            raise ValueError("There is no message to encode in this meeting.")
        self._encoded = self.state.codec.encode(self._message, self._seed, self._sketch, partner_sketch)
        return self._encoded.payload

    def judge(self, partner_payload: Tensor) -> str:
        """Decode the partner's message; return why it must not be merged, empty if it may."""
        if self._encoded is None or self._message is None:
            raise ValueError("Nothing was sent in this meeting that an answer could be read against.")
        state, self._accepted = self.state, None
        try:
            gap = state.codec.gap(self._encoded, partner_payload)
        except ValueError as error:
            return str(error)
        gap_length = _length(gap.values)
        own = self._lengths(self._message, gap.values, gap_length)
        reason = state.gate.judge(gap_length, own)
        if not reason:
            self._accepted = Accepted(gap, gap_length, own)
        return reason

    @property
    def failed_blocks(self) -> Tensor:
        """Return bool[num_blocks]: what did not decode here."""
        return self._need_accepted().gap.failed

    def step(self, failed_blocks: Tensor) -> OuterStep:
        """Compute the outer step with the partner; blocks that failed on either side, the same for both, are taken alone."""
        accepted, state = self._need_accepted(), self.state
        failed = state.codec.failed_values(failed_blocks)

        def step(part: slice) -> tuple[Tensor, Tensor]:
            alone, gap = None if failed is None else failed[part], accepted.gap.values[part]
            return self._rule.pair_step(state.slow[part], state.momentum[part], self.snapshot[part], self._weight, gap, alone)

        return state.in_slabs(self.snapshot, step)

    def merge(self, step: OuterStep) -> None:
        """Make the meeting count: merge its step into the fragment, and let the gate learn from it. Inner steps made meanwhile are kept."""
        accepted = self._need_accepted()
        self.state.merge(step, self.since)
        self.state.gate.accept(accepted.gap_length, accepted.own)

    def _lengths(self, message: Tensor, gap: Tensor, gap_length: float) -> Lengths:
        movement = self.snapshot - self.state.slow
        moved, own = _length(movement), _length(message)
        partner = math.sqrt(max(0.0, own**2 + gap_length**2 + 2.0 * float(torch.dot(message, gap))))
        back = -float(torch.dot(movement, gap)) / moved if moved else 0.0
        return Lengths(self.since.moved(moved), moved / max(1, self.since.steps), own, partner, back)

    def _need_accepted(self) -> Accepted:
        if self._accepted is None:
            raise ValueError("No message was accepted in this meeting.")
        return self._accepted


def bounded_weight(own_tokens: int, partner_tokens: int) -> float:
    """Return one's share of the pair's tokens: no less than a sixteenth of the other's, but nothing for who has none.

    Tokens are what a peer says of itself: without the bound, one that boasts would take the whole of the pair's progress for its own. Both
    sides compute it from the same two numbers, so their weights still sum to 1.
    """
    if not own_tokens or not partner_tokens:  # a joiner has learnt nothing yet: what it has is others', and counts with them already
        return token_weight(own_tokens, partner_tokens)
    own, partner = max(own_tokens, partner_tokens // MAX_TOKEN_RATIO), max(partner_tokens, own_tokens // MAX_TOKEN_RATIO)
    return token_weight(own, partner)


def _length(values: Tensor) -> float:
    length = float(values.norm())
    return length if math.isfinite(length) else float(values.double().norm())  # the square of a legal value can overflow f32
