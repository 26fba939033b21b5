"""Packed sequences: each conversation once and whole, none of them in two sequences, and in each sequence something to learn."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.peer.text.labels import beginnings, marked, num_targets
from gossamer.peer.text.packing import PackedSequences

WIDTH, PADDING = 8, 99
DOCUMENTS = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), max_size=12)


def numbered(documents: list[list[bool]]) -> tuple[np.ndarray, list[list[int]]]:
    """Documents with a different id for each token; returns also what must be in the sequences: none without a target."""
    marks, kept, first = [np.empty(0, np.int32)], [], 100
    for trains in documents:
        whole = marked(np.arange(first, first + len(trains)), np.array(trains))
        marks.append(whole)
        first += len(trains)
        if (whole[:WIDTH] >= 0).any():
            kept.append(whole[:WIDTH].tolist())
    return np.concatenate(marks), kept


@given(DOCUMENTS, st.booleans())
def test_each_document_with_a_target_is_in_one_sequence_whole(documents: list[list[bool]], shares: bool) -> None:
    marks, kept = numbered(documents)
    packed = PackedSequences(marks, WIDTH, PADDING, shares=shares)
    rows = packed.sequences(np.arange(len(packed)))
    found = []
    for row in rows:
        tokens = row[row != ~PADDING].astype(np.int32)
        assert (row[len(tokens) :] == ~PADDING).all(), "padding comes last"
        found += [part.tolist() for part in np.split(tokens, beginnings(tokens)[1:])]
        assert int(num_targets(torch.from_numpy(row[None]))) > 0, "a batch of it would have no loss"
    assert found == kept
    assert packed.num_targets == sum(token >= 0 for each in kept for token in each)
    if not shares:
        assert len(packed) == len(kept)


@given(DOCUMENTS)
def test_a_sequence_is_closed_only_when_the_next_document_does_not_fit(documents: list[list[bool]]) -> None:
    marks, _ = numbered(documents)
    packed = PackedSequences(marks, WIDTH, PADDING, shares=True)
    lengths = [int((row != ~PADDING).sum()) for row in packed.sequences(np.arange(len(packed)))]
    firsts = [
        int(np.append(beginnings(row[row != ~PADDING].astype(np.int32)), WIDTH)[1]) for row in packed.sequences(np.arange(len(packed)))
    ]
    whole = [min(first, length) for first, length in zip(firsts, lengths, strict=True)]
    assert all(length + following > WIDTH for length, following in zip(lengths, whole[1:], strict=False))


def test_a_part_has_the_same_sequences() -> None:
    marks, _ = numbered([[False, True, True]] * 9)
    packed = PackedSequences(marks, WIDTH, PADDING, shares=True)
    part = packed.part(1, 4)
    assert (len(packed), len(part)) == (5, 3)
    assert np.array_equal(part.sequences(np.arange(3)), packed.sequences(np.arange(1, 4)))
