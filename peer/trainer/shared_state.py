"""A replica's state as it travels between peers: slow weights in bf16 by fragment, and momentum likewise where the run has any.

A fetched state cannot be checked against a hash: no two peers have the same weights. So it must have the right length, be finite and of a
sane size, and have no worse a loss on our own held-out data than our weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from gossamer.peer.link import messages
from gossamer.peer.link.payload_folder import PayloadFolder, mapped
from gossamer.peer.machine.units import bytes_text
from gossamer.peer.trainer.fragment_state import FragmentState, FragmentWeights, length_of
from gossamer.peer.trainer.losses import Losses, measured_with, try_change
from gossamer.peer.trainer.replica import Replica
from gossamer.peer.trainer.weights import Weights, uninterrupted
from gossamer.protocol.run.manifest import ProgramManifest

MOST_GROWTH: Final = 100.0  # of a fragment's values over our own; those of the demo grow threefold in a whole run
MOST_MOMENTUM: Final = 1.0  # times the size of the weights: the longest honest outer step is a third of that
TOLERANCE: Final = 0.01  # times the size of our own loss: a few batches are no exact measure
SPLIT_GROWTH: Final = 2.0  # times the loss above ours that is allowed, for each result on which the partners have not agreed


def write_state(replica: Replica, payloads: PayloadFolder, name: str) -> None:
    """Write a replica's state to a file of the payload folder; may run on a second thread. Raises OSError, with the file removed.

    A merge replaces a fragment's tensors and never writes to them, so each fragment is whole; not all need be of the same moment.
    """
    tensors = [f.slow for f in replica.fragments] + [f.momentum for f in replica.fragments if f.has_momentum]
    num_bytes, free_bytes = 2 * sum(tensor.numel() for tensor in tensors), payloads.free_bytes()
    if num_bytes > free_bytes:
        raise OSError(0, f"a copy of the state takes {bytes_text(num_bytes)} of shared memory, {bytes_text(free_bytes)} are free")
    try:
        payloads.write(name, b"")
        for tensor in tensors:
            payloads.append(name, tensor.to(torch.bfloat16).cpu().view(torch.int16).numpy().data)
    except OSError:
        payloads.remove(name)
        raise


def read_state(data: memoryview, fragments: Sequence[FragmentState], *, is_comparable: bool = True) -> tuple[FragmentWeights, ...]:
    """Return the parts of a state, in the order of the fragments; zeros for momentum where the run has none.

    `is_comparable`: our own weights are of this run, so their size says what is sane. Raises ValueError, with the reason, for bytes that
    cannot be the state of a peer like us.
    """
    has_momentum = fragments[0].has_momentum
    num_values = sum(fragment.slow.numel() for fragment in fragments)
    num_bytes = (4 if has_momentum else 2) * num_values
    if len(data) != num_bytes:
        raise ValueError(f"the state has {len(data)} bytes, this model's has {num_bytes}")
    flat = torch.frombuffer(data, dtype=torch.bfloat16)
    slow = list(_cut(flat, fragments))
    momentum = list(_cut(flat[num_values:], fragments)) if has_momentum else [fragment.momentum for fragment in fragments]
    parts = tuple(map(FragmentWeights, fragments, slow, momentum))
    _need_sane(parts, is_comparable=is_comparable)
    return parts


def _cut(flat: Tensor, fragments: Sequence[FragmentState]) -> Iterator[Tensor]:
    for fragment in fragments:
        numel = fragment.slow.numel()
        yield flat[:numel].to(fragment.slow.device, torch.float32)
        flat = flat[numel:]


def _need_sane(parts: Sequence[FragmentWeights], *, is_comparable: bool) -> None:
    numels, sizes = [part.slow.numel() for part in parts], [_size(part.fragment.slow) for part in parts]
    whole = math.sqrt(sum(numel * size**2 for numel, size in zip(numels, sizes, strict=True)) / sum(numels))
    for part, size in zip(parts, sizes, strict=True):
        own = max(whole, size)  # a fragment may begin with zeros
        name, slow, momentum = part.fragment.codec.fragment.name, _size(part.slow), _size(part.momentum)
        if not math.isfinite(slow + momentum):
            raise ValueError("the state holds values that are not finite")
        if not is_comparable or part.fragment.codec.fragment.holds_statistics:
            continue
        if slow > MOST_GROWTH * own:
            raise ValueError(f"the weights of {name} are {slow:.3g} large, ours {own:.3g}")
        if momentum > MOST_MOMENTUM * max(own, slow):
            raise ValueError(f"the momentum of {name} is {momentum:.3g} large, the weights {own:.3g}")


def write_result(replica: Replica) -> None:
    """Round slow weights and momentum as a written state rounds them, and make the fast weights the slow ones."""
    for fragment in replica.fragments:
        momentum = fragment.momentum.bfloat16().float() if fragment.has_momentum else fragment.momentum
        fragment.replace(fragment.slow.bfloat16().float(), momentum)
        replica.weights.scatter(fragment.codec.fragment, fragment.slow)


def adopt(replica: Replica, request: messages.Adopt, before_taking: Callable[[], None]) -> messages.Adopted:
    """Take over a fetched state; refuse one with no more steps than our own weights, or whose loss on our data is worse.

    A state that fails by its loss alone shows that ours is as far as the other peers', whatever the clocks say. Then only their clock is
    taken over, so that we can meet them again. A program may also begin so: its user has given it weights that are better than the run's.
    `before_taking` is called once before weights are replaced.
    """
    total_steps = replica.manifest.run.total_steps
    global_step = total_steps if request.is_result else min(request.global_step, total_steps)
    if replica.own_steps and global_step <= replica.global_step and not request.is_result:
        reason = f"{global_step} steps are behind it, {replica.global_step} behind our own weights"
        return messages.Adopted(request.name, False, reason)
    try:
        is_comparable = replica.own_steps > 0 or replica.manifest.has_start(is_founder=False)
        parts = read_state(mapped(Path(request.name)), replica.fragments, is_comparable=is_comparable)
    except ValueError as error:
        return messages.Adopted(request.name, False, str(error), is_sound=False)
    measure = replica.program.losses
    reason = _judge_result(replica, parts, request) if request.is_result else try_on(parts, replica.weights, measure, TOLERANCE)
    if not reason:
        with uninterrupted(unless=replica.weights.is_sharded):  # other ranks may let us wait for long
            before_taking()
            replica.take_over(parts, global_step)
        return messages.Adopted(request.name, True, "")
    begins = not replica.own_steps and request.may_begin and isinstance(replica.manifest, ProgramManifest)
    if request.is_result or not request.takes_clock or not (replica.own_steps or begins):
        return messages.Adopted(request.name, False, reason)
    replica.set_global_step(global_step)
    if begins:
        replica.note_joined()
    return messages.Adopted(request.name, True, reason)


def _judge_result(replica: Replica, parts: Sequence[FragmentWeights], request: messages.Adopt) -> str:
    """Put a run's result into the model, or return why not; one that is agreed is judged by its form alone, which `read_state` has done.

    The loss of our own weights is the worst of three: as we brought them to the last averaging, as it has left them, and of the slow ones.
    A result that other peers averaged may have a slightly higher loss on our data. It also lacks our training since the last outer step if
    those peers have not merged that; on unlike data this costs much. The allowed excess grows with each result on which the partners have
    not agreed.
    """
    if request.is_agreed:
        _put(parts, replica.weights)
        return ""
    far = [part.fragment.codec.fragment.name for part in parts if not part.fragment.reaches(part.slow)]
    if far:
        return f"{far[0]} is farther from ours than the last averaging explains"
    own = [FragmentWeights(fragment, fragment.slow, fragment.momentum) for fragment in replica.fragments]
    measure, weights = replica.program.losses, replica.weights
    losses = [measure(), measured_with(lambda: _put(own, weights), weights, measure)]
    worst = max([*losses, *filter(None, [replica.brought])], key=lambda measured: measured.mean)
    return try_change(lambda: _put(parts, weights), weights, worst, measure, TOLERANCE * SPLIT_GROWTH**request.num_splits)


def try_on(parts: Sequence[FragmentWeights], weights: Weights, measure: Callable[[], Losses], tolerance: float) -> str:
    """Put slow weights into the model; return why they do not work, with the model as it was, or nothing."""
    return try_change(lambda: _put(parts, weights), weights, measure(), measure, tolerance)


def _put(parts: Sequence[FragmentWeights], weights: Weights) -> None:
    for part in parts:
        weights.scatter(part.fragment.codec.fragment, part.slow)


def _size(tensor: Tensor) -> float:
    """Return the root mean square: not finite where a value is not."""
    return length_of(tensor) / math.sqrt(tensor.numel())
