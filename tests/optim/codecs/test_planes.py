from __future__ import annotations

import pytest
import torch

from optim.codecs.planes import PLANES, pack, unpack


@pytest.mark.parametrize("bits", PLANES)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_round_trip(bits: int, rows: int) -> None:
    codes = torch.randint(0, 2**bits, (rows, 1024), dtype=torch.int32)
    packed = torch.empty((rows, 1024 * bits // 8), dtype=torch.uint8)
    pack(codes, bits, packed)
    assert torch.equal(unpack(packed, bits).to(torch.int32), codes)


@pytest.mark.parametrize("bits", PLANES)
def test_every_byte_string_is_a_packing(bits: int) -> None:
    packed = torch.randint(0, 256, (5, 1024 * bits // 8), dtype=torch.uint8)
    again = torch.empty_like(packed)
    pack(unpack(packed, bits).to(torch.int32), bits, again)
    assert torch.equal(packed, again)


def test_layout_of_four_bits() -> None:
    codes = torch.arange(64, dtype=torch.int32)[None] % 16
    codes[0, 32:] = 15 - codes[0, 32:]
    packed = torch.empty((1, 32), dtype=torch.uint8)
    pack(codes, 4, packed)
    assert packed[0, :3].tolist() == [0xF0, 0xE1, 0xD2]
