from __future__ import annotations

import pytest
import torch

from optim.codecs.bits import num_bytes, pack, require_clean_end, unpack


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 1001])
def test_round_trip(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (count,), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (num_bytes(count, bits),)
    assert torch.equal(unpack(packed, bits, count), codes)


def test_the_first_code_is_lowest() -> None:
    assert pack(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist() == [0x21, 0x03]
    assert pack(torch.tensor([1, 2, 3, 0, 1], dtype=torch.uint8), 2).tolist() == [0b00111001, 0b01]
    assert pack(torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1], dtype=torch.uint8), 1).tolist() == [0b1101, 1]


def test_set_bits_after_the_end_are_refused() -> None:
    require_clean_end(torch.tensor([0x21, 0x03], dtype=torch.uint8), 4, 3, "test")
    with pytest.raises(ValueError, match="after its last code"):
        require_clean_end(torch.tensor([0x21, 0x13], dtype=torch.uint8), 4, 3, "test")
