"""Marked tokens: what a model reads, where it stands in its document, and what trains."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.peer.text.labels import BEGINS, IGNORED, beginnings, ids_of, marked, num_targets, positions_of, targets_of

DOCUMENTS = st.lists(st.lists(st.tuples(st.integers(0, BEGINS - 1), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=6)
Documents = list[list[tuple[int, bool]]]


def joined(documents: Documents) -> np.ndarray:
    return np.concatenate([marked(np.array([i for i, _ in each]), np.array([trains for _, trains in each])) for each in documents])


@given(DOCUMENTS)
def test_marks_keep_ids_places_and_what_trains(documents: Documents) -> None:
    marks = joined(documents)
    rows = torch.from_numpy(marks.astype(np.int64))[None]
    places = [place for each in documents for place in range(len(each))]
    assert ids_of(rows)[0].tolist() == [i for each in documents for i, _ in each]
    assert positions_of(rows)[0].tolist() == places
    assert beginnings(marks).tolist() == [number for number, place in enumerate(places) if place == 0]
    trained = [i if trains and place else IGNORED for each in documents for place, (i, trains) in enumerate(each)]
    assert targets_of(rows)[0].tolist() == trained[1:]
    assert int(num_targets(rows)) == sum(one != IGNORED for one in trained[1:])


@given(st.lists(st.integers(0, BEGINS - 1), min_size=2, max_size=9))
def test_plain_tokens_are_their_own_marks(tokens: list[int]) -> None:
    rows = torch.tensor([tokens])
    assert torch.equal(ids_of(rows), rows) and torch.equal(targets_of(rows), rows[:, 1:])
    assert int(num_targets(rows)) == len(tokens) - 1 and positions_of(rows)[0].tolist() == list(range(len(tokens)))
