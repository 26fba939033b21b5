"""Fragments: the parts of a model that are exchanged together, and when each is due.

A fragment is a group of transformer blocks (strided, as in Streaming DiLoCo, arXiv 2501.18512 section 2.2), or everything outside the
blocks. Inside a fragment the large tensors come first (they go through the codec), the small ones after (they travel in fp32).
No tensor is kept here, and nothing here knows of partners or the network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

MIN_CODED_VALUES = 4096
BLOCK_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.\d+\.")


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter tensor: its name in the model and how many values it has."""

    name: str
    numel: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of the model, laid out as one flat vector of `numel` values.

    `pieces` stand in the order of the flat vector; the first `num_coded` values go through the codec, the rest travels in fp32.
    """

    id: int
    name: str
    pieces: tuple[Piece, ...]
    num_coded: int

    @property
    def numel(self) -> int:
        """Return how many values the flat vector has."""
        return sum(piece.numel for piece in self.pieces)


def split(shapes: Mapping[str, tuple[int, ...]], blocks_per_fragment: int) -> tuple[Fragment, ...]:
    """Cut a model into fragments of about `blocks_per_fragment` strided transformer blocks, plus one for all that is outside the blocks.

    With P = ceil(blocks / blocks_per_fragment), fragment p holds blocks p, p+P, p+2P, ...; the last fragment holds embeddings, head and
    final norm. `shapes` maps each parameter's name to its shape, in the model's order (which the fragments keep). A model without
    blocks becomes one fragment. Raises ValueError for a model without parameters, an empty parameter, or blocks_per_fragment < 1.
    """
    if blocks_per_fragment < 1:
        raise ValueError(f"blocks_per_fragment must be at least 1, not {blocks_per_fragment}.")
    if not shapes:
        raise ValueError("A model without parameters cannot be split into fragments.")
    blocks, outside = _blocks(shapes)
    stride = math.ceil(len(blocks) / blocks_per_fragment)
    groups = [(f"blocks-{'-'.join(map(str, range(p, len(blocks), stride)))}", _flatten(blocks[p::stride])) for p in range(stride)]
    if outside:
        groups.append(("outside-blocks", outside))
    return tuple(_fragment(index, name, pieces) for index, (name, pieces) in enumerate(groups))


def _blocks(shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[list[Piece]], list[Piece]]:
    """Sort the parameters into blocks, in order of first appearance, and those outside any block."""
    blocks: dict[str, list[Piece]] = {}
    outside: list[Piece] = []
    for name, shape in shapes.items():
        piece = Piece(name, math.prod(shape))
        if piece.numel == 0:
            raise ValueError(f"Parameter {name} has no values (shape {tuple(shape)}).")
        found = BLOCK_NAME.search(name)
        (blocks.setdefault(name[: found.end()], []) if found else outside).append(piece)
    return list(blocks.values()), outside


def _flatten(blocks: list[list[Piece]]) -> list[Piece]:
    return [piece for block in blocks for piece in block]


def _fragment(index: int, name: str, pieces: list[Piece]) -> Fragment:
    large = [piece for piece in pieces if piece.numel >= MIN_CODED_VALUES]
    small = [piece for piece in pieces if piece.numel < MIN_CODED_VALUES]
    return Fragment(index, name, (*large, *small), sum(piece.numel for piece in large))


def gather(fragment: Fragment, tensors: Mapping[str, Tensor]) -> Tensor:
    """Copy the fragment's tensors into one new flat vector.

    Returns f32[fragment.numel] on the tensors' device, without gradient; the caller owns it. Raises KeyError for a missing tensor and
    ValueError for one of another size.
    """
    device = tensors[fragment.pieces[0].name].device
    flat = torch.empty(fragment.numel, dtype=torch.float32, device=device)
    with torch.no_grad():
        for tensor, place in _places(fragment, flat, tensors):
            place.copy_(tensor)
    return flat


def scatter(fragment: Fragment, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Copy a flat f32[fragment.numel] vector into the fragment's tensors, in place and without gradient.

    Raises KeyError for a missing tensor and ValueError when `flat` or a tensor has another size; nothing is written then.
    """
    with torch.no_grad():
        for tensor, place in _places(fragment, flat, tensors):
            tensor.copy_(place)


def add(fragment: Fragment, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Add a flat f32[fragment.numel] vector to the fragment's tensors, in place and without gradient; allocates nothing on the device.

    Raises as `scatter`; nothing is written then.
    """
    with torch.no_grad():
        for tensor, place in _places(fragment, flat, tensors):
            tensor.add_(place)


def _places(fragment: Fragment, flat: Tensor, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pair each tensor with its view of the flat vector. Raises as `scatter`, before anything is paired."""
    if flat.shape != (fragment.numel,):
        raise ValueError(f"Fragment {fragment.name} has {fragment.numel} values, the flat vector has shape {tuple(flat.shape)}.")
    pairs = []
    start = 0
    for piece in fragment.pieces:
        tensor = tensors[piece.name]
        if tensor.numel() != piece.numel:
            raise ValueError(f"Parameter {piece.name} has {tensor.numel()} values, the fragment expects {piece.numel}.")
        pairs.append((tensor, flat[start : start + piece.numel].view(tensor.shape)))
        start += piece.numel
    return pairs


class Countdown:
    """Counts inner steps per fragment down to its next meeting.

    Every period is drawn uniformly from [0.5, 1.5] times `inner_steps` (whole steps, mean exactly `inner_steps`); the first ones are
    spread evenly, fragment i of F at inner_steps * (i + 1) / F, with the same relative jitter. Draws depend only on (seed, fragment,
    count), so a restored countdown goes on exactly. Give each peer its own seed, or all become due at once. Not thread safe.
    """

    def __init__(self, num_fragments: int, inner_steps: int, seed: int) -> None:
        if num_fragments < 1 or inner_steps < 1:
            raise ValueError(f"A countdown needs at least one fragment and one inner step, not {num_fragments} and {inner_steps}.")
        self._inner_steps = inner_steps
        self._seed = seed
        self._num_drawn = [1] * num_fragments
        self._remaining = [self._first(fragment, num_fragments) for fragment in range(num_fragments)]

    def tick(self) -> list[int]:
        """Count one inner step and return the ids of the fragments that became due with it.

        A due fragment is returned once and rests at zero until `reset`.
        """
        counting = [fragment for fragment, steps in enumerate(self._remaining) if steps > 0]
        for fragment in counting:
            self._remaining[fragment] -= 1
        return [fragment for fragment in counting if self._remaining[fragment] == 0]

    def due(self) -> list[int]:
        """Return the ids of the fragments that are due and were not reset yet (after a restore: those to ask for again)."""
        return [fragment for fragment, steps in enumerate(self._remaining) if steps == 0]

    def reset(self, fragment_id: int) -> None:
        """Start the fragment's next period, due or not."""
        low, high = (self._inner_steps + 1) // 2, 3 * self._inner_steps // 2
        self._remaining[fragment_id] = low + int(self._uniform(fragment_id) * (high - low + 1))

    def state(self) -> dict[str, list[int]]:
        """Return a JSON-able copy of the countdown."""
        return {"remaining": list(self._remaining), "num_drawn": list(self._num_drawn)}

    def restore(self, state: Mapping[str, list[int]]) -> None:
        """Take over what `state` returned. Raises ValueError when it is not from a countdown of as many fragments."""
        remaining, num_drawn = list(state["remaining"]), list(state["num_drawn"])
        if not len(remaining) == len(num_drawn) == len(self._remaining) or min(remaining) < 0:
            raise ValueError(f"This is not the state of a countdown over {len(self._remaining)} fragments.")
        self._remaining, self._num_drawn = remaining, num_drawn

    def _first(self, fragment: int, num_fragments: int) -> int:
        offset = self._inner_steps * (fragment + 1) / num_fragments
        jitter = 0.5 + Random(f"{self._seed}/{fragment}/0").random()
        return max(1, round(offset * jitter))

    def _uniform(self, fragment: int) -> float:
        count = self._num_drawn[fragment]
        self._num_drawn[fragment] = count + 1
        return Random(f"{self._seed}/{fragment}/{count}").random()
