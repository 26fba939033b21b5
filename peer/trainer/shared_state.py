"""A replica's state as it travels: slow weights in bf16 by fragment, and momentum likewise where the run has any.

What others gave cannot be checked against anything: no two peers have the same weights, and a state may be put together from pieces of
several. So it must be of the right length, finite and of a sane size, and predict our own held-out text no worse than what we have. Values
that are finite and huge would pass every other check, be saved over the good checkpoints, and end the training at the next batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gossamer.optim.fragments import add, scatter
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.trainer.fragment_state import FragmentState, length_of

MOST_GROWTH: Final = 100.0  # of a fragment's values over our own; those of the demo grow threefold in a whole run
MOST_MOMENTUM: Final = 1.0  # as large as the weights: the longest honest outer step is a third of that
TOLERANCE: Final = 1.01  # times the loss of our own weights: a few batches are no exact measure
RESULT_TOLERANCE: Final = 1.05  # likewise of a run's result: those who came to the end first may lack a little, and there shall be one
PULL_TOLERANCE: Final = 1.05  # likewise for fragments that are pulled: the others have not come up to them yet


@dataclass(frozen=True, slots=True)
class FragmentWeights:
    """A fragment's part of a state: new tensors, f32[numel], on the device where the fragment's rest."""

    fragment: FragmentState
    slow: Tensor
    momentum: Tensor


@dataclass(frozen=True, slots=True)
class FragmentShift:
    """What was pulled of a fragment, and waits for the others of its round."""

    name: str  # of the pull
    fragment: FragmentState
    values: Tensor  # f32[numel] at rest: from where we were to where another's is
    failed_share: float  # of the blocks


def write_state(fragments: Sequence[FragmentState], has_momentum: bool, payloads: PayloadFolder, name: str) -> None:
    """Write the state of these fragments to a file of the payload folder; may run on a second thread. Raises OSError, file removed.

    A merge replaces a fragment's tensors and changes none, so each is as it was at some moment; not all need be of the same.
    """
    tensors = [fragment.slow for fragment in fragments] + [fragment.momentum for fragment in fragments if has_momentum]
    num_bytes, free_bytes = 2 * sum(tensor.numel() for tensor in tensors), payloads.free_bytes()
    if num_bytes > free_bytes:
        raise OSError(0, f"a copy of the state takes {num_bytes / 1e6:.0f} MB of shared memory, {free_bytes / 1e6:.0f} MB are free")
    try:
        payloads.write(name, b"")
        for tensor in tensors:
            payloads.append(name, tensor.to(torch.bfloat16).cpu().view(torch.int16).numpy().data)
    except OSError:
        payloads.remove(name)
        raise


def payload_tensor(payloads: PayloadFolder, name: str, device: torch.device) -> Tensor:
    """Return a file of the payload folder as uint8[bytes] on a device; a missing file is empty."""
    data = payloads.read(name)
    return torch.frombuffer(data, dtype=torch.uint8).to(device) if data else torch.empty(0, dtype=torch.uint8, device=device)


def read_state(data: memoryview, fragments: Sequence[FragmentState], has_momentum: bool) -> tuple[FragmentWeights, ...]:
    """Return the parts of a state, in the order of the fragments; zeros for momentum where the run has none.

    Raises ValueError, with the reason, for bytes that cannot be the state of a peer like us.
    """
    num_values = sum(fragment.slow.numel() for fragment in fragments)
    num_bytes = (4 if has_momentum else 2) * num_values
    if len(data) != num_bytes:
        raise ValueError(f"the state has {len(data)} bytes, this model's has {num_bytes}")
    flat = torch.frombuffer(data, dtype=torch.bfloat16)
    slow = list(_cut(flat, fragments))
    momentum = list(_cut(flat[num_values:], fragments)) if has_momentum else [fragment.momentum for fragment in fragments]
    parts = tuple(map(FragmentWeights, fragments, slow, momentum))
    _need_sane(parts)
    return parts


def _cut(flat: Tensor, fragments: Sequence[FragmentState]) -> Iterator[Tensor]:
    for fragment in fragments:
        numel = fragment.slow.numel()
        yield flat[:numel].to(fragment.slow.device, torch.float32)
        flat = flat[numel:]


def _need_sane(parts: Sequence[FragmentWeights]) -> None:
    numels, sizes = [part.slow.numel() for part in parts], [_size(part.fragment.slow) for part in parts]
    whole = math.sqrt(sum(numel * size**2 for numel, size in zip(numels, sizes, strict=True)) / sum(numels))
    for part, size in zip(parts, sizes, strict=True):
        own = max(whole, size)  # a fragment may begin with zeros
        name, slow, momentum = part.fragment.codec.fragment.name, _size(part.slow), _size(part.momentum)
        if not math.isfinite(slow + momentum):
            raise ValueError("the state holds values that are not finite")
        if slow > MOST_GROWTH * own:
            raise ValueError(f"the weights of {name} are {slow:.3g} large, ours {own:.3g}")
        if momentum > MOST_MOMENTUM * max(own, slow):
            raise ValueError(f"the momentum of {name} is {momentum:.3g} large, the weights {own:.3g}")


def settle(fragments: Sequence[FragmentState], parameters: Mapping[str, Tensor]) -> None:
    """Round slow weights and momentum to what others get of them, and make the fast weights the slow ones."""
    for fragment in fragments:
        momentum = fragment.momentum.bfloat16().float() if fragment.has_momentum else fragment.momentum
        fragment.replace(fragment.slow.bfloat16().float(), momentum)
        scatter(fragment.codec.fragment, fragment.slow, parameters)


def try_on(
    parts: Sequence[FragmentWeights], parameters: Mapping[str, Tensor], loss: Callable[[], float], tolerance: float = TOLERANCE
) -> str:
    """Put slow weights into the model; return why they do not work, with the model as it was, or nothing."""

    def put() -> None:
        for part in parts:
            scatter(part.fragment.codec.fragment, part.slow, parameters)

    return _try(put, parameters, loss(), loss, tolerance)


def try_shifts(
    donors: Sequence[Sequence[FragmentShift]], parameters: Mapping[str, Tensor], loss: Callable[[], float]
) -> tuple[list[FragmentShift], str]:
    """Move the fast weights by what donors gave: by all of it, else by all of some donors; return what counts, and why not the rest.

    What counts is together no worse than what was there, within the tolerance. The loss is measured twice where everybody is honest.
    """
    own, moved = loss(), list[FragmentShift]()

    def shift(shifts: Sequence[FragmentShift]) -> str:
        def add_all() -> None:
            for part in shifts:
                add(part.fragment.codec.fragment, part.fragment.here(part.values), parameters)

        reason = _try(add_all, parameters, own, loss, PULL_TOLERANCE)
        moved.extend(() if reason else shifts)
        return reason

    reason = shift([part for shifts in donors for part in shifts])
    if reason and len(donors) > 1:
        reason = next(filter(None, [shift(shifts) for shifts in donors]), reason)
    return moved, reason


def _try(change: Callable[[], None], parameters: Mapping[str, Tensor], own: float, loss: Callable[[], float], tolerance: float) -> str:
    before = [parameter.detach().clone() for parameter in parameters.values()]
    change()
    theirs = loss()
    if math.isfinite(theirs) and not theirs > tolerance * own:  # ours may be none at all
        return ""
    with torch.no_grad():
        for parameter, values in zip(parameters.values(), before, strict=True):
            parameter.copy_(values)
    return f"its loss on held-out text is {theirs:.4f}, that of our own weights {own:.4f}"


def _size(tensor: Tensor) -> float:
    """Return the root mean square: not finite where a value is not."""
    return length_of(tensor) / math.sqrt(tensor.numel())
