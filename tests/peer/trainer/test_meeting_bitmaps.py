from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.trainer.meeting import pack, unpack

CPU = torch.device("cpu")


def test_none_failed_is_empty() -> None:
    assert pack(torch.zeros(100, dtype=torch.bool)) == ""
    assert not unpack("", 100, CPU).any()
    assert unpack("", 0, CPU).shape == (0,)
    assert pack(torch.zeros(0, dtype=torch.bool)) == ""


def test_the_lowest_bit_is_the_first_block() -> None:
    failed = torch.zeros(10, dtype=torch.bool)
    failed[[0, 2, 9]] = True
    assert pack(failed) == "0502"


@given(st.lists(st.booleans(), max_size=50))
def test_what_was_packed_is_unpacked(blocks: list[bool]) -> None:
    failed = torch.tensor(blocks, dtype=torch.bool)
    assert torch.equal(unpack(pack(failed), len(blocks), CPU), failed)


@pytest.mark.parametrize(("text", "num_blocks"), [("01", 9), ("0101", 8), ("01", 0), ("zz", 8)])
def test_a_list_of_another_size_is_refused(text: str, num_blocks: int) -> None:
    with pytest.raises(ValueError):
        unpack(text, num_blocks, CPU)
