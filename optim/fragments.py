"""Fragments: the parts of a model that peers exchange together, and the countdown to the next meeting of each.

A fragment is a group of transformer blocks (strided, as in Streaming DiLoCo, arXiv 2501.18512 section 2.2), or everything outside the
blocks. Inside a fragment the large tensors come first and go through the codec. The small ones follow and travel in fp32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import Any

import torch
from torch import Tensor

MIN_CODED_VALUES = 4096
# Mean interval between a fragment's meetings on demand, in mean countdowns, among peers of equal speed. Partners begin half of the
# meetings, and each of these cuts the countdown short. T solves T = E[min(countdown, call)], with the countdown uniform in [0.5, 1.5]
# and calls Poisson of rate 1 / (2 T).
MEETING_INTERVAL = 0.70
STATISTICS_GROUP = "statistics"  # fragments of tensors that peers average and nobody extrapolates, such as those of a batch norm
STATISTICS = f"{STATISTICS_GROUP}/"  # how the names of these tensors begin
BLOCK_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.\d+\.")


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter tensor, or some of its rows: its name in the model and its number of values."""

    name: str
    numel: int
    rows: tuple[int, int] | None = None  # first, and one past the last, along the tensor's first dimension; None: all of them

    def of(self, tensor: Tensor) -> Tensor:
        """Return the piece's part of its parameter: a view."""
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of the model, laid out as one flat vector of `numel` values."""

    id: int
    name: str
    pieces: tuple[Piece, ...]  # in the order of the flat vector
    num_coded: int  # values at its start, which go through the codec; the rest travels in fp32

    @property
    def numel(self) -> int:
        """Return the number of values of the flat vector."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def holds_statistics(self) -> bool:
        """Whether its values are averaged at all times, without momentum."""
        return self.name.startswith(STATISTICS_GROUP)


Shapes = Mapping[str, tuple[int, ...]]


def split(shapes: Shapes, max_values: int, blocks_per_fragment: int | None = None) -> tuple[Fragment, ...]:
    """Cut a model into fragments of at most `max_values` values: of strided transformer blocks, and of all that is outside the blocks.

    A model that fits is one fragment. Otherwise, and where `blocks_per_fragment` is given, fragment p of P holds blocks p, p+P, p+2P, ...;
    the last of these holds embeddings, head and final norm. Statistics are fragments of their own, at the end. A group that is still too
    large is cut at tensors, and tensors at rows: only a single row may have more than `max_values`. Fragments keep the order of `shapes`.
    Raises ValueError for a model without parameters, an empty parameter, or a size below 1.
    """
    if max_values < 1 or (blocks_per_fragment is not None and blocks_per_fragment < 1):
        raise ValueError(f"A fragment needs at least one value and one block, not {max_values} and {blocks_per_fragment}.")
    if not shapes:
        raise ValueError("A model without parameters cannot be split into fragments.")
    for name, shape in shapes.items():
        if not math.prod(shape):
            raise ValueError(f"Parameter {name} has no values (shape {tuple(shape)}).")
    statistics = [Piece(name, math.prod(shape)) for name, shape in shapes.items() if name.startswith(STATISTICS)]
    blocks, outside = _blocks({name: shape for name, shape in shapes.items() if not name.startswith(STATISTICS)})
    in_blocks = sum(_numel(block) for block in blocks)
    if not blocks and not outside:
        groups: list[tuple[str, list[Piece]]] = []
    elif blocks_per_fragment is None and in_blocks + _numel(outside) <= max_values:
        groups = [("all", [*chain.from_iterable(blocks), *outside])]
    else:
        stride = math.ceil(len(blocks) / blocks_per_fragment if blocks_per_fragment else min(len(blocks), in_blocks / max_values))
        groups = [
            (f"blocks-{'-'.join(map(str, range(p, len(blocks), stride)))}", list(chain.from_iterable(blocks[p::stride])))
            for p in range(stride)
        ]
        groups += [("outside-blocks", outside)] * bool(outside)
    groups += [(STATISTICS_GROUP, statistics)] * bool(statistics)
    parts = [part for name, pieces in groups for part in _parts(name, pieces, shapes, max_values)]
    return tuple(_fragment(index, name, pieces) for index, (name, pieces) in enumerate(parts))


def _blocks(shapes: Shapes) -> tuple[list[list[Piece]], list[Piece]]:
    """Sort the parameters into blocks, in order of first appearance, and those outside any block."""
    blocks: dict[str, list[Piece]] = {}
    outside: list[Piece] = []
    for name, shape in shapes.items():
        found = BLOCK_NAME.search(name)
        (blocks.setdefault(name[: found.end()], []) if found else outside).append(Piece(name, math.prod(shape)))
    return list(blocks.values()), outside


def _numel(pieces: list[Piece]) -> int:
    return sum(piece.numel for piece in pieces)


def _parts(name: str, pieces: list[Piece], shapes: Shapes, max_values: int) -> list[tuple[str, list[Piece]]]:
    """Cut a group into parts of about equal size; only a part of a single row may be larger than `max_values`."""
    num_parts = math.ceil(_numel(pieces) / max_values)
    if num_parts == 1:
        return [(name, pieces)]
    parts: list[list[Piece]] = [[]]
    num_rows_of = {piece.name: shapes[piece.name][0] if shapes[piece.name] else 1 for piece in pieces}  # a scalar is one row
    longest_row = max(piece.numel // num_rows_of[piece.name] for piece in pieces)
    # One row more than an even share: otherwise rounding adds a part.
    room = most = min(max_values, math.ceil(_numel(pieces) / num_parts) + longest_row - 1)
    for piece in pieces:
        num_rows = num_rows_of[piece.name]
        row_values, first = piece.numel // num_rows, 0
        while first < num_rows:
            if room < row_values and parts[-1]:
                parts.append([])
                room = most
            count = min(num_rows - first, max(1, room // row_values))
            rows = None if count == num_rows else (first, first + count)
            parts[-1].append(Piece(piece.name, count * row_values, rows))
            room -= count * row_values
            first += count
    return [(f"{name}-part-{number}", part) for number, part in enumerate(parts)]


def _fragment(index: int, name: str, pieces: list[Piece]) -> Fragment:
    large = [piece for piece in pieces if piece.numel >= MIN_CODED_VALUES]
    small = [piece for piece in pieces if piece.numel < MIN_CODED_VALUES]
    return Fragment(index, name, (*large, *small), 0 if name.startswith(STATISTICS_GROUP) else _numel(large))


def gather(fragment: Fragment, tensors: Mapping[str, Tensor]) -> Tensor:
    """Copy the fragment's tensors into a new flat f32[fragment.numel] on their device, without gradient. Raises as `scatter`."""
    device = tensors[fragment.pieces[0].name].device
    flat = torch.empty(fragment.numel, dtype=torch.float32, device=device)
    with torch.no_grad():
        for tensor, place in _paired_views(fragment, flat, tensors):
            place.copy_(tensor)
    return flat


def scatter(fragment: Fragment, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Copy a flat f32[fragment.numel] vector into the fragment's tensors, in place and without gradient.

    Raises KeyError for a missing tensor, ValueError when `flat` or a tensor has another size; nothing is written then.
    """
    with torch.no_grad():
        for tensor, place in _paired_views(fragment, flat, tensors):
            tensor.copy_(place)


def add(fragment: Fragment, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Add a flat vector to the fragment's tensors, as `scatter` copies it; allocates nothing on the device."""
    with torch.no_grad():
        for tensor, place in _paired_views(fragment, flat, tensors):
            tensor.add_(place)


def _paired_views(fragment: Fragment, flat: Tensor, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    if flat.shape != (fragment.numel,):
        raise ValueError(f"Fragment {fragment.name} has {fragment.numel} values, the flat vector has shape {tuple(flat.shape)}.")
    pairs = []
    start = 0
    for piece in fragment.pieces:
        tensor = piece.of(tensors[piece.name])
        if tensor.numel() != piece.numel:
            raise ValueError(f"Parameter {piece.name} has {tensor.numel()} values, the fragment expects {piece.numel}.")
        pairs.append((tensor, flat[start : start + piece.numel].view(tensor.shape)))
        start += piece.numel
    return pairs


class Countdown:
    """Counts inner steps per fragment down to its next meeting.

    Every period is drawn uniformly from [0.5, 1.5] times `inner_steps` (whole steps, mean exactly that); the first ones are spread evenly,
    fragment i of F at inner_steps * (i + 1) / F, with the same relative jitter. Draws depend only on (seed, fragment, count), so a restored
    countdown continues exactly. Give each peer its own seed: with equal seeds all peers become due at once.
    """

    def __init__(self, num_fragments: int, inner_steps: int, seed: int) -> None:
        if num_fragments < 1 or inner_steps < 1:
            raise ValueError(f"A countdown needs at least one fragment and one inner step, not {num_fragments} and {inner_steps}.")
        self.inner_steps = inner_steps
        self._seed = seed
        self._num_drawn = [0] * num_fragments
        offsets = [inner_steps * (fragment + 1) / num_fragments for fragment in range(num_fragments)]
        self._remaining = [max(1, round(offset * (0.5 + self._uniform(fragment)))) for fragment, offset in enumerate(offsets)]

    def tick(self) -> list[int]:
        """Count one inner step and return the ids of the fragments that became due with it; each rests at zero until `reset`."""
        counting = [fragment for fragment, steps in enumerate(self._remaining) if steps > 0]
        for fragment in counting:
            self._remaining[fragment] -= 1
        return [fragment for fragment in counting if self._remaining[fragment] == 0]

    def due(self) -> list[int]:
        """Return the ids of the fragments that are due and not reset yet; after a restore these must be requested again."""
        return [fragment for fragment, steps in enumerate(self._remaining) if steps == 0]

    def reset(self, fragment_id: int, counted_steps: int = 0) -> None:
        """Start the fragment's next period, due or not; `counted_steps` of it have already been made."""
        low, high = (self.inner_steps + 1) // 2, 3 * self.inner_steps // 2
        self._remaining[fragment_id] = max(1, low + int(self._uniform(fragment_id) * (high - low + 1)) - counted_steps)

    def pace(self, inner_steps: int) -> None:
        """Use `inner_steps` as the mean period from now on; running countdowns are cut to the longest new period."""
        self.inner_steps = inner_steps
        self._remaining = [min(steps, 3 * inner_steps // 2) for steps in self._remaining]

    def state(self) -> dict[str, Any]:
        """Return a JSON-able copy of the countdown."""
        return {"remaining": list(self._remaining), "num_drawn": list(self._num_drawn), "inner_steps": self.inner_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Raises ValueError for the state of a countdown with another number of fragments."""
        remaining, num_drawn = list(state["remaining"]), list(state["num_drawn"])
        if not len(remaining) == len(num_drawn) == len(self._remaining) or min(remaining) < 0:
            raise ValueError(f"This is not the state of a countdown over {len(self._remaining)} fragments.")
        self._remaining, self._num_drawn, self.inner_steps = remaining, num_drawn, state["inner_steps"]

    def _uniform(self, fragment: int) -> float:
        count = self._num_drawn[fragment]
        self._num_drawn[fragment] = count + 1
        return Random(f"{self._seed}/{fragment}/{count}").random()
