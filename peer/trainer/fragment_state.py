"""One fragment of a replica: slow weights, momentum, counts since the last outer step, and the merge gate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.noloco import NoLoCo
from gossamer.peer.model.accelerator import has_own_memory
from gossamer.peer.trainer.weights import Weights, uninterrupted
from gossamer.protocol.newest import keep_newest

SLAB_VALUES = 1 << 15  # 128 KiB: the result of one operation is still in the processor's cache at the next
DEVICE_SLAB_VALUES = 1 << 24  # on other devices: 64 MiB at a time are copied from the host

LIMIT: Final = 2.0  # reaches, at most; honest gaps of peers that meet regularly come to half of it, seldom to all of it
USUAL: Final = 1.5  # times the median of the latest gaps: half of the honest ones are shorter than two thirds of this, one in ten is longer
LATEST: Final = 15  # merged gaps of each place...
MOST_PLACES: Final = 15  # ...of those met last
ENOUGH: Final = 5  # gaps, from which on their median holds
BACK: Final = 1.5  # reaches; honest gaps of peers that meet regularly come to a quarter of it
FIRST_ALLOWANCE: Final = 2.0  # of the message's length: a peer that has met nobody has little to lose
FULL_STEPS: Final = 60.0  # own steps: the level to which the allowance grows again, or falls
EARNED: Final = 0.1  # of our own movement
LEAST_KEPT: Final = 0.25  # of a gap: a message of which less could be merged is refused
FINAL: Final = 2.0  # times the longest gap of the last averaging; two peers of it may both have been met by a third alone
UNRELATED: Final = 0.99  # of the longer message's length


@dataclass(frozen=True, slots=True)
class OuterStep:
    """A fragment's next slow weights and momentum, and what to add to its fast weights."""

    slow: Tensor  # f32[numel], at rest
    momentum: Tensor  # f32[numel], at rest
    shift: Tensor  # f32[numel], on the device


@dataclass(frozen=True, slots=True)
class Since:
    """Counts since a fragment's last outer step."""

    tokens: int = 0  # trained
    steps: int = 0  # inner steps
    missed_steps: int = 0  # clock steps that were not trained here

    def __sub__(self, earlier: Since) -> Since:
        return Since(self.tokens - earlier.tokens, self.steps - earlier.steps, self.missed_steps - earlier.missed_steps)

    def moved(self, length: float) -> float:
        """Return the length of a movement, extrapolated over the missed steps."""
        return length * (1.0 + self.missed_steps / max(1, self.steps))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Euclidean lengths of a fragment's vectors at a meeting."""

    moved: float  # our own movement since the last outer step, extrapolated over the clock steps that were not trained here
    step: float  # our own movement in one step
    message: float  # our message: about the weights
    partner: float  # the partner's message
    back: float  # the gap's part against our own movement since the last outer step; negative where it leads on


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a fragment may be from those of other peers."""

    reach: float = 0.0  # explained by training; the movement since the last outer step comes on top
    allowance: float | None = None  # to be merged beyond that; None before the first meeting
    gaps: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of partners of our pace, in reaches, by place; last met last


class MergeGate:
    """Judges whether a partner's message is of a size that honest training explains. Scalars only; one gate for each fragment.

    A gap is the partner's message minus our own. It grows with the steps that both peers have made since they last agreed, directly or
    through other peers. A peer knows its own part of that, its `reach`: the lengths of its own pseudo-gradients since then, added up,
    solo steps included. A meeting halves the reach and adds half of what the gap shows of the partner's; with a slower partner, which is
    merged in part, it takes that part of a half away. Clock steps that were not trained here count as if the peer had moved. Peers that
    train alike have similar reaches: training explains a gap of `LIMIT` reaches, unless the gap leads back along our own movement by more
    than `BACK`.

    A peer that was away, alone for long, or in the other half of a network split is farther off; from a new peer all peers are. For these
    cases a peer has an `allowance`: the part of a gap that the reach does not explain is taken from it. It grows again by a tenth of
    the peer's own movement, up to `FULL_STEPS` of its steps at their present length. No claim of a partner increases it, except a clock
    that ours follows. So a partner that always sends as much as is allowed gets through once, and is then limited to the rate at which
    our own training refills the allowance.

    The allowance does not cover a message that shares nothing with our weights: two unrelated vectors lie farther apart than either is
    long. The gate stops noise, overflow and the weights of other models. It does not stop a patient malicious peer that keeps to the
    usual size; that counts as the harm that a member can do. (Honest gaps and attacks: docs/log.md, "A gate that knows who trained how
    much".)
    """

    def __init__(self) -> None:
        self._bounds = Bounds()

    def limit(self, own: Lengths) -> float:
        """Return how long a gap may be."""
        return self._explained(own) + self._allowance(own)

    def judge(self, gap: float, own: Lengths) -> str:
        """Return why a gap of this length must not be merged; empty if it may. Changes nothing."""
        if not math.isfinite(gap):
            return "the partner's message is not finite"
        if self.limit(own) < LEAST_KEPT * gap:
            return (
                f"the partner's message is {gap:.3g} away from ours, far more than the {self.limit(own):.3g} that honest training explains"
            )
        fits = gap <= max(self._explained(own), UNRELATED * max(own.message, own.partner))
        return "" if fits else f"the partner's message is {gap:.3g} away from ours and has nothing in common with it"

    def kept(self, gap: float, own: Lengths, share: float) -> float:
        """Return the part of a gap that may be merged without a probe: at most `share` of what training explains."""
        return min(1.0, share * self._explained(own) / gap) if gap else 1.0

    def accept(self, gap: float, own: Lengths, kept: float = 1.0, most: float = 1.0, place: str = "") -> None:
        """Update the bounds after a merge of this part of a gap. `most`: what is merged at most of a partner of this pace.

        The gap to a slower partner is of another length than that to others, and says nothing about those. A partner whose place was met
        more lately than most places brings us no nearer to these than its gap is long: it may send our own message back.
        """
        bounds, allowance, merged = self._bounds, self._allowance(own), kept * gap
        before = bounds.reach + own.moved
        unexplained = min(allowance, max(0.0, merged - self._explained(own)))
        reach = math.hypot((1.0 - 0.5 * most) * before, 0.5 * min(merged, before + unexplained))
        if place in list(bounds.gaps)[(len(bounds.gaps) + 1) // 2 :]:
            reach = max(reach, before - 0.5 * merged)
        gaps = dict(bounds.gaps)
        if before and most == 1.0:
            keep_newest(gaps, place, (*gaps.get(place, ()), min(LIMIT, gap / before))[-LATEST:], MOST_PLACES)
        self._bounds = Bounds(reach, allowance - unexplained, gaps)

    def take_solo_step(self, moved: float) -> None:
        """Update the bounds after an outer step without a partner."""
        self._bounds = replace(self._bounds, reach=self._bounds.reach + moved)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, JSON-able."""
        return {**asdict(self._bounds), "gaps": {place: list(gaps) for place, gaps in self._bounds.gaps.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Gaps of before they were kept by place are forgotten: five new ones take their place."""
        gaps = state.get("gaps", {})
        by_place = {place: tuple(latest) for place, latest in gaps.items()} if isinstance(gaps, Mapping) else {}
        self._bounds = Bounds(state["reach"], state["allowance"], by_place)

    def _explained(self, own: Lengths) -> float:
        reach, gaps = self._bounds.reach + own.moved, self._bounds.gaps.values()
        is_known = sum(map(len, gaps)) >= ENOUGH
        limit = min(LIMIT, USUAL * statistics.median(map(statistics.median, gaps))) if is_known else LIMIT
        return limit * reach if own.back <= BACK * reach else 0.0

    def _allowance(self, own: Lengths) -> float:
        """Return the present allowance, refilled by the movement since the last outer step."""
        allowance, full = self._bounds.allowance, FULL_STEPS * own.step
        if allowance is None:
            return FIRST_ALLOWANCE * own.message
        if allowance <= full:
            return min(full, allowance + EARNED * own.moved)
        return full + (allowance - full) * max(0.0, 1.0 - own.moved / full) if full else allowance


class FragmentState:
    """One fragment of a replica. `weights` are the model's own, and are written to by `move_fast_weights` alone.

    Slow weights and momentum are needed at meetings only, so beside a device with its own memory they rest in pinned memory of the host.
    They are replaced and never written to: a reader on another thread keeps a whole tensor. An outer step changes them at once, the model
    at the next boundary.
    """

    def __init__(self, codec: FragmentCodec, weights: Weights, has_momentum: bool = True) -> None:
        self.codec = codec
        self.has_momentum = has_momentum
        fast = weights.gather(codec.fragment)
        self.device = fast.device
        self.slow = self.to_host(fast)  # f32[numel]
        nothing = self.slow.new_zeros(()).expand(self.slow.shape)  # one stored zero: a run without momentum keeps none
        self.momentum = self.to_host(nothing.clone()) if has_momentum else nothing
        self.gate = MergeGate()
        self.since = Since()
        self.meeting: int | None = None  # the number of the meeting that holds the fragment
        self.num_writes = 0  # to the fast weights, by anything else than the optimizer
        self.final_gap = 0.0  # the longest in the last averaging; 0: there was none
        self._weights = weights
        self._owed: Tensor | None = None  # still to be added to the model's fast weights

    def count(self, num_tokens: int) -> None:
        """Count an inner step."""
        self.since = replace(self.since, tokens=self.since.tokens + num_tokens, steps=self.since.steps + 1)

    def count_missed_steps(self, num_steps: int) -> None:
        """Count clock steps that were not trained here."""
        self.since = replace(self.since, missed_steps=self.since.missed_steps + num_steps)

    def replace(self, slow: Tensor, momentum: Tensor) -> None:
        """Take over another peer's slow weights and momentum, and forget counts and gate; the fast weights are the caller's to set."""
        self.slow, self.momentum = self.to_host(slow), self.to_host(momentum) if self.has_momentum else momentum
        self._owed = None  # to weights that are gone
        self.since, self.gate = Since(), MergeGate()
        self.num_writes += 1

    def to_host(self, values: Tensor) -> Tensor:
        """Return values where slow weights rest: a pinned copy on the host if the device has its own memory, else the values themselves."""
        if not has_own_memory(self.device.type):
            return values
        host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        return host.copy_(values)  # waits for the GPU

    def on_device(self, values: Tensor) -> Tensor:
        """Return resting values, or a part of them, on the device."""
        return values.to(self.device)

    def fast(self) -> Tensor:
        """Return the fast weights as they are after the next `move_fast_weights`: a new f32[numel]."""
        fast = self._weights.gather(self.codec.fragment)
        return fast if self._owed is None else fast.add_(self._owed)

    def reaches(self, weights: Tensor) -> bool:
        """Return whether the run's result may have these weights: as far from ours as the last averaging explains, if we took part."""
        fast = self.fast()
        moved, away = length_of(fast - self.on_device(self.slow)), length_of(self.on_device(weights) - fast)
        own = Lengths(self.since.moved(moved), moved / max(1, self.since.steps), length_of(fast), 0.0, 0.0)
        return not self.final_gap or away <= max(FINAL * self.final_gap, self.gate.limit(own))

    def take_solo_step(self, rule: NoLoCo) -> None:
        """Take the outer step without a partner. The model itself is moved by `move_fast_weights`."""
        fast = self.fast()
        self.gate.take_solo_step(self.since.moved(length_of(fast - self.on_device(self.slow))))
        self.merge(self.in_slabs(fast, lambda slow, momentum, part: rule.solo_step(slow, momentum, fast[part])), self.since)

    def merge(self, step: OuterStep, since: Since) -> None:
        """Make an outer step count that was computed at the counts `since`. Nothing is allocated, so nothing can fail half done.

        Takes ownership of its tensors. The model itself is moved by `move_fast_weights`.
        """
        with uninterrupted():
            self._owed = step.shift if self._owed is None else self._owed.add_(step.shift)
            self.slow, self.momentum = step.slow, step.momentum
            self.since -= since

    @property
    def owes_move(self) -> bool:
        """Whether there were outer steps by which the model's fast weights have not moved yet."""
        return self._owed is not None

    def move_fast_weights(self) -> None:
        """Move the model's fast weights by the outer steps since the last call: never while a gradient is computed at them."""
        if self._owed is not None:
            if has_own_memory(self.device.type):  # made on another stream: not to be reused there before this stream has read it
                self._owed.record_stream(torch.accelerator.current_stream(self.device))
            with uninterrupted(unless=self._weights.is_sharded):  # other ranks may let us wait for long
                self._weights.add(self.codec.fragment, self._owed)
                self._owed = None
                self.num_writes += 1

    def in_slabs(self, snapshot: Tensor, step: Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]]) -> OuterStep:
        """Compute an outer step from a snapshot of the fast weights, slab by slab.

        `step(slow, momentum, part)` takes the slab at `part` and returns its next slow weights and momentum.
        """
        slow, shift = self._empty_like_slow(), torch.empty_like(snapshot)
        momentum = self._empty_like_slow() if self.has_momentum else self.momentum
        size = SLAB_VALUES if self.device.type == "cpu" else DEVICE_SLAB_VALUES
        for start in range(0, slow.numel(), size):
            part = slice(start, start + size)
            old_slow = self.on_device(self.slow[part])
            old_momentum = self.on_device(self.momentum[part]) if self.has_momentum else old_slow.new_zeros(()).expand(old_slow.shape)
            new_slow, new_momentum = step(old_slow, old_momentum, part)
            torch.sub(new_slow, snapshot[part], out=shift[part])
            if self.has_momentum:
                momentum[part] = new_momentum
            slow[part] = new_slow  # last: this copy waits for the GPU, and so for everything that reads the snapshot
        return OuterStep(slow, momentum, shift)

    def _empty_like_slow(self) -> Tensor:
        is_pinned = has_own_memory(self.device.type)
        return torch.empty(self.slow.shape, dtype=self.slow.dtype, device=self.slow.device, pin_memory=is_pinned)


@dataclass(frozen=True, slots=True)
class FragmentWeights:
    """A fragment's part of another peer's state: new tensors, f32[numel], on the device where the fragment's rest."""

    fragment: FragmentState
    slow: Tensor
    momentum: Tensor


def length_of(values: Tensor) -> float:
    """Return the Euclidean length; finite for all finite values."""
    length = float(values.norm())
    if math.isfinite(length):
        return length
    largest = float(values.abs().max())  # the square of a legal value can overflow f32, and some devices have no f64
    return largest * float((values / largest).norm())


def bytes_on(device: torch.device, data: memoryview) -> Tensor:
    """Return bytes as uint8[bytes] on a device."""
    return torch.frombuffer(data, dtype=torch.uint8).to(device) if data else torch.empty(0, dtype=torch.uint8, device=device)
