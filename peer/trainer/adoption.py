"""What of a donor's clone can be checked before it is trained on: length, that it is numbers of a sane size, that they give a loss.

No two peers have the same weights, so nothing here says that they are good; only that they are not absurd. Values that are finite and huge
would pass every other check, be saved over the good checkpoints, and end the training at the next batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from optim.fragments import scatter
from peer.trainer.meeting import FragmentState

MOST_GROWTH: Final = 100.0  # of a fragment's values over our own; those of the demo grow threefold in a whole run
MOST_MOMENTUM: Final = 1.0  # as large as the weights: the longest honest outer step is a third of that


def parts(flat: Tensor, fragments: Sequence[FragmentState]) -> Iterator[tuple[FragmentState, Tensor, Tensor]]:
    """Cut a clone into (fragment, slow weights, momentum); views of `flat`."""
    for fragment in fragments:
        numel = fragment.slow.numel()
        yield fragment, flat[:numel], flat[numel : 2 * numel]
        flat = flat[2 * numel :]


def why_not(data: memoryview, fragments: Sequence[FragmentState]) -> str:
    """Return why these bytes (f32, as `parts` cuts them) cannot be the state of a peer like us; empty if they can."""
    num_bytes = 8 * sum(fragment.slow.numel() for fragment in fragments)
    if len(data) != num_bytes:
        return f"the clone has {len(data)} bytes, this model's has {num_bytes}"
    flat = torch.frombuffer(data, dtype=torch.float32)
    if not bool(torch.isfinite(flat).all()):
        return "the clone holds values that are not finite"
    whole = _size(*(fragment.slow for fragment in fragments))  # for a fragment that begins with zeros
    for fragment, slow, momentum in parts(flat, fragments):
        own = max(whole, _size(fragment.slow))
        name = fragment.codec.fragment.name
        if _size(slow) > MOST_GROWTH * own:
            return f"the clone's weights of {name} are {_size(slow):.3g} large, ours {own:.3g}"
        if _size(momentum) > MOST_MOMENTUM * max(own, _size(slow)):
            return f"the clone's momentum of {name} is {_size(momentum):.3g} large, the weights {own:.3g}"
    return ""


def try_on(data: memoryview, fragments: Sequence[FragmentState], parameters: Mapping[str, Tensor], loss: Callable[[], float]) -> str:
    """Put a clone's slow weights into the model; return why they do not work, with the model as it was, or nothing."""
    before = [parameter.detach().clone() for parameter in parameters.values()]
    for fragment, slow, _ in parts(torch.frombuffer(data, dtype=torch.float32), fragments):
        scatter(fragment.codec.fragment, slow.to(fragment.slow.device), parameters)
    held_out = loss()
    if math.isfinite(held_out):
        return ""
    with torch.no_grad():
        for parameter, values in zip(parameters.values(), before, strict=True):
            parameter.copy_(values)
    return f"the clone's loss on held-out text is {held_out}"


def _size(*tensors: Tensor) -> float:
    """Return the root mean square, in float64: the square of a legal value can overflow f32."""
    squares = math.fsum(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in tensors)
    return math.sqrt(squares / sum(tensor.numel() for tensor in tensors))
