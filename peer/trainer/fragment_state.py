"""One fragment of a replica between meetings: slow weights, momentum, what has happened since the last outer step, and where they rest."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.fragments import add, gather
from gossamer.optim.noloco import PairRule
from gossamer.peer.trainer.merge_gate import MergeGate

SLAB_VALUES = 1 << 15  # 128 KiB: what one operation leaves in the processor's cache, the next one finds there
DEVICE_SLAB_VALUES = 1 << 24  # on other devices: 64 MiB of what rests on the host at a time


@dataclass(frozen=True, slots=True)
class OuterStep:
    """A fragment's next slow weights and momentum, and what to add to its fast weights."""

    slow: Tensor  # f32[numel], at rest
    momentum: Tensor  # f32[numel], at rest
    shift: Tensor  # f32[numel], on the device


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
    """One fragment of a replica between meetings. `parameters` are the model's own tensors, by name, and are written to.

    Slow weights and momentum are needed at meetings only: beside a GPU they rest in pinned memory of the host.
    """

    def __init__(self, codec: FragmentCodec, parameters: Mapping[str, Tensor], has_momentum: bool = True) -> None:
        self.codec = codec
        self.has_momentum = has_momentum
        fast = gather(codec.fragment, parameters)
        self.device = fast.device
        self.slow = self.at_rest(fast)  # f32[numel]
        nothing = self.slow.new_zeros(()).expand(self.slow.shape)  # one zero, seen as many: a run without momentum keeps none
        self.momentum = self.at_rest(nothing.clone()) if has_momentum else nothing
        self.gate = MergeGate()
        self.since = Since()
        self.meeting: int | None = None
        self._parameters = parameters
        self._owed: Tensor | None = None  # to the model's fast weights

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
        self.slow, self.momentum = self.at_rest(slow), self.at_rest(momentum) if self.has_momentum else momentum
        self.since, self.gate = Since(), MergeGate()

    def at_rest(self, values: Tensor) -> Tensor:
        """Return values where this state rests: beside a GPU a pinned copy on the host, else themselves."""
        if self.device.type != "cuda":
            return values
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values)  # waits for it

    def here(self, values: Tensor) -> Tensor:
        """Return values at rest, or a part of them, where meetings are computed."""
        return values.to(self.device)

    def fast(self) -> Tensor:
        """Return the fast weights, with what the model is still to be moved by: a new f32[numel]."""
        fast = gather(self.codec.fragment, self._parameters)
        return fast if self._owed is None else fast.add_(self._owed)

    def step_alone(self, rule: PairRule) -> None:
        """Take the outer step without a partner. The model itself is moved by `move`."""
        fast = self.fast()
        self.gate.step_alone(self.since.moved(length_of(fast - self.here(self.slow))))
        self.merge(self.in_slabs(fast, lambda slow, momentum, part: rule.solo_step(slow, momentum, fast[part])), self.since)

    def merge(self, step: OuterStep, since: Since) -> None:
        """Make an outer step count that was computed from what had happened till then; all or nothing, for nothing is allocated.

        Takes its tensors. The model itself is moved by `move`.
        """
        self._owed = step.shift if self._owed is None else self._owed.add_(step.shift)
        self.slow, self.momentum = step.slow, step.momentum
        self.since -= since

    def move(self) -> None:
        """Move the model's fast weights by the outer steps that count: not while a gradient is computed at them."""
        if self._owed is not None:
            if self._owed.is_cuda:  # a second thread's stream may have made it: its memory may serve that one again after this one only
                self._owed.record_stream(torch.cuda.current_stream(self._owed.device))
            add(self.codec.fragment, self._owed, self._parameters)
            self._owed = None

    def in_slabs(self, snapshot: Tensor, step: Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]]) -> OuterStep:
        """Compute an outer step from a snapshot of the fast weights, slab by slab.

        `step` takes a slab's slow weights and momentum, and which it is, and returns the next ones.
        """
        slow, shift = self._place(), torch.empty_like(snapshot)
        momentum = self._place() if self.has_momentum else self.momentum
        size = SLAB_VALUES if self.device.type == "cpu" else DEVICE_SLAB_VALUES
        for start in range(0, slow.numel(), size):
            part = slice(start, start + size)
            new_slow, new_momentum = step(self.here(self.slow[part]), self.here(self.momentum[part]), part)
            torch.sub(new_slow, snapshot[part], out=shift[part])
            if self.has_momentum:
                momentum[part] = new_momentum
            slow[part] = new_slow  # at last: from a GPU it is waited for, and with it for all that reads the snapshot
        return OuterStep(slow, momentum, shift)

    def _place(self) -> Tensor:
        return torch.empty(self.slow.shape, dtype=self.slow.dtype, device=self.slow.device, pin_memory=self.device.type == "cuda")


@dataclass(frozen=True, slots=True)
class FragmentWeights:
    """A fragment's part of another peer's state: new tensors, f32[numel], on the device where the fragment's rest."""

    fragment: FragmentState
    slow: Tensor
    momentum: Tensor


def length_of(values: Tensor) -> float:
    """Return the Euclidean length; finite for all finite values."""
    length = float(values.norm())
    return length if math.isfinite(length) else float(values.double().norm())  # the square of a legal value can overflow f32


def bytes_on(device: torch.device, data: memoryview) -> Tensor:
    """Return bytes as uint8[bytes] on a device."""
    return torch.frombuffer(data, dtype=torch.uint8).to(device) if data else torch.empty(0, dtype=torch.uint8, device=device)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Return a mark after what was last started on a GPU, so that others need not wait for more than that; None elsewhere."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@contextlib.contextmanager
def behind(passed: torch.cuda.Event | None, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run what is inside on a stream of a GPU, once a mark there has been passed, and finish it; without a stream there is no GPU."""
    if stream is None:
        yield
        return
    if passed is not None:
        stream.wait_event(passed)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
