from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.peer.text import batches
from gossamer.peer.text.batches import Draw, WindowOrder, held_out_batches, permutation, random_stream


def draw(peer: bytes = b"a", run_seed: int = 0, batch_size: int = 4, sequence_length: int = 10) -> Draw:
    return Draw(run_seed, peer, batch_size, sequence_length)


def starts(of: Draw, num_steps: int, num_tokens: int) -> list[int]:
    order = WindowOrder(of, num_tokens)
    return [int(start) for step in range(num_steps) for start in order.starts(step)]


def test_a_permutation_hits_everything_once_and_looks_shuffled() -> None:
    found = permutation(random_stream(draw(), b"test", 0), 10_000)
    assert sorted(found.tolist()) == list(range(10_000))
    assert abs(np.corrcoef(found, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.05


def test_every_purpose_and_number_has_a_stream_of_its_own() -> None:
    drawn = {int(random_stream(draw(), purpose, number).random_raw()) for purpose in (b"one", b"two") for number in range(5)}
    assert len(drawn) == 10


@given(st.integers(11, 500), st.integers(1, 7), st.integers(0, 10**9))
@settings(max_examples=50)
def test_windows_stay_inside_the_text(num_tokens: int, batch_size: int, step: int) -> None:
    found = WindowOrder(draw(batch_size=batch_size), num_tokens).starts(step)
    assert found.shape == (batch_size,)
    assert (found >= 0).all()
    assert (found + 11 <= num_tokens).all()


def test_a_pass_reads_each_window_once() -> None:
    num_tokens = 10 * (48 + 1) + 1  # 48 windows, and one of slack
    one_pass = starts(draw(), 12, num_tokens)
    assert len({start // 10 for start in one_pass}) == 48
    assert len({start % 10 for start in one_pass}) == 1
    next_pass = starts(draw(), 24, num_tokens)[48:]
    assert len({start // 10 for start in next_pass}) == 48
    assert [start // 10 for start in next_pass] != [start // 10 for start in one_pass]


def test_a_batch_may_span_two_passes() -> None:
    of = draw(batch_size=5)
    num_tokens = 10 * (3 + 1) + 1  # 3 windows
    found = starts(of, 3, num_tokens)
    for number in range(5):
        assert len({start // 10 for start in found[3 * number : 3 * number + 3]}) == 3


def test_a_long_text_is_read_in_parts_that_span_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_PART_WINDOWS", 20)
    num_tokens = 10 * (48 + 1) + 1  # 48 windows: three parts of 16
    windows = [start // 10 for start in starts(draw(), 12, num_tokens)]
    assert sorted(windows) == list(range(48))
    parts = [windows[:16], windows[16:32], windows[32:]]
    assert all(len({window % 3 for window in part}) == 1 and max(part) - min(part) == 45 for part in parts)
    others = [start // 10 for peer in range(8) for start in starts(draw(peer=bytes([peer])), 1, num_tokens)]
    assert {window % 3 for window in others} == {0, 1, 2}


def test_a_batch_depends_on_the_step_alone() -> None:
    order = WindowOrder(draw(), 1000)
    forwards = [order.starts(step).tolist() for step in range(50)]
    backwards = [WindowOrder(draw(), 1000).starts(step).tolist() for step in reversed(range(50))]
    assert forwards == backwards[::-1] == [order.starts(step).tolist() for step in range(50)]


@pytest.mark.parametrize("other", [draw(peer=b"b"), draw(run_seed=1)])
def test_peers_and_runs_read_in_other_orders(other: Draw) -> None:
    num_tokens = 100_000
    mine, theirs = starts(draw(), 25, num_tokens), starts(other, 25, num_tokens)
    assert mine != theirs
    assert len(set(mine) & set(theirs)) < 10


def test_the_order_does_not_change_between_releases() -> None:
    """A resumed run, and a paper's rerun, must read what was read."""
    assert WindowOrder(draw(), 100_000).starts(3).tolist() == [79675, 55225, 78535, 98935]


def test_held_out_batches_span_the_text() -> None:
    batches = held_out_batches(np.arange(500, dtype=np.uint16), draw(), 3)
    assert [batch.shape for batch in batches] == [(4, 11)] * 3
    assert all(batch.dtype == torch.int64 for batch in batches)
    assert batches[0][0].tolist() == list(range(11))
    assert batches[-1][-1].tolist() == list(range(489, 500))


def test_a_short_held_out_text_is_read_again() -> None:
    batches = held_out_batches(np.arange(11, dtype=np.uint8), draw(), 2)
    assert all((batch == torch.arange(11)).all() for batch in batches)
