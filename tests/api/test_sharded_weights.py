"""Weights that are sharded over ranks by rows: the rows of each rank, and real ranks against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.rank_program import row_range
from tests.api.forked import Forks
from tests.api.test_swarm import ForkedPrograms, all_ended

PROGRAM = str(Path(__file__).with_name("sharded_weights_on_ranks.py"))


@given(st.integers(0, 1000), st.integers(1, 64))
def test_ranks_hold_each_row_once_in_order(num_rows: int, count: int) -> None:
    ranges = [row_range(num_rows, number, count) for number in range(count)]
    assert [row for first, last in ranges for row in range(first, last)] == list(range(num_rows))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_are_read_and_written_as_one_process_would(forks: Forks, tmp_path: Path, count: int) -> None:
    there = {"WORLD_SIZE": str(count), "STORE": str(tmp_path / "store")}
    programs = ForkedPrograms(tmp_path, forks)
    with all_ended(programs):
        for rank in [programs.fork(PROGRAM, **there, RANK=str(rank)) for rank in range(count)]:
            assert rank.process.wait(100) == 0, rank.printed.read_text()
