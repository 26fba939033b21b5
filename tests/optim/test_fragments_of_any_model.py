"""Cutting of models that are no language models: of any dimensions, scalars included, with and without blocks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.optim.codecs import CODECS
from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.fragments import add, gather, scatter, split

NAMES = st.sampled_from(
    ["stem.weight", "layer1.0.conv1.weight", "scale", "head.bias", "blocks.0.w", "blocks.1.w", "h.0.w", "h.0.b", "x.layers.3.w"]
)
SHAPES = st.dictionaries(NAMES, st.lists(st.integers(1, 9), max_size=4).map(tuple), min_size=1)


@given(SHAPES, st.integers(1, 3000), st.none() | st.integers(1, 3))
@settings(max_examples=300)
def test_every_value_travels_once_and_no_fragment_is_larger_than_is_wanted(
    shapes: dict[str, tuple[int, ...]], max_values: int, blocks_per_fragment: int | None
) -> None:
    fragments = split(shapes, max_values, blocks_per_fragment)
    assert [fragment.id for fragment in fragments] == list(range(len(fragments)))
    assert sum(fragment.numel for fragment in fragments) == sum(map(math.prod, shapes.values()))
    for fragment in fragments:
        rows = [math.prod(shapes[piece.name][1:]) for piece in fragment.pieces]
        assert fragment.numel <= max_values or (len(rows) == 1 and fragment.numel == rows[0])
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    added, copied = ({name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    for fragment in fragments:
        flat = gather(fragment, tensors)
        add(fragment, flat, added)
        scatter(fragment, flat, copied)
    for name, tensor in tensors.items():
        assert torch.equal(added[name], tensor) and torch.equal(copied[name], tensor)


def test_weights_in_another_memory_format_travel_by_value() -> None:
    weight = torch.randn(8, 4, 3, 3)
    moved = {"conv": weight.clone().contiguous(memory_format=torch.channels_last)}
    for fragment in split({"conv": (8, 4, 3, 3)}, 100):
        assert torch.equal(gather(fragment, moved), gather(fragment, {"conv": weight}))
        add(fragment, torch.ones(fragment.numel), moved)
    assert torch.equal(moved["conv"], weight + 1)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    "shapes",
    [{"scale": ()}, {"bias": (3,), "scale": ()}, {"stem": (64, 3, 7, 7)}, {"stem": (64, 3, 7, 7), "scale": (), "bias": (64,)}],
    ids=["a scalar", "small tensors", "a convolution", "both"],
)
def test_two_peers_agree_on_the_gap_of_any_model(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    draw = torch.Generator().manual_seed(0)
    [fragment] = split(shapes, 1 << 20)
    coded = FragmentCodec(fragment, CODECS[name])
    ours = torch.randn(fragment.numel, generator=draw)
    theirs = ours + 0.01 * torch.randn(fragment.numel, generator=draw)
    sketches = [coded.sketch(message, 7) for message in (ours, theirs)]
    here, there = coded.encode(ours, 7, sketches[0], sketches[1]), coded.encode(theirs, 7, sketches[1], sketches[0])
    assert here.payload.numel() == there.payload.numel() == coded.payload_bytes
    found, mirrored = coded.gap(here, there.payload), coded.gap(there, here.payload)
    assert torch.equal(found.values, -mirrored.values) and torch.equal(found.failed, mirrored.failed)
    small = slice(fragment.num_coded, None)
    torch.testing.assert_close(found.values[small], (theirs - ours)[small])
