from __future__ import annotations

import pytest
import torch

from gossamer.optim.codecs.planes import PLANES, difference, pack, unpack


@pytest.mark.parametrize("bits", PLANES)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_round_trip(bits: int, rows: int) -> None:
    codes = torch.randint(0, 2**bits, (rows, 1024), dtype=torch.uint8)
    packed = torch.empty((rows, 1024 * bits // 8), dtype=torch.uint8)
    pack(codes, bits, packed)
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", PLANES)
def test_every_byte_string_is_a_packing(bits: int) -> None:
    packed = torch.randint(0, 256, (5, 1024 * bits // 8), dtype=torch.uint8)
    again = torch.empty_like(packed)
    pack(unpack(packed, bits), bits, again)
    assert torch.equal(packed, again)


def test_layout_of_four_bits() -> None:
    codes = torch.arange(64, dtype=torch.uint8)[None] % 16
    codes[0, 32:] = 15 - codes[0, 32:]
    packed = torch.empty((1, 32), dtype=torch.uint8)
    pack(codes, 4, packed)
    assert packed[0, :3].tolist() == [0xF0, 0xE1, 0xD2]


@pytest.mark.parametrize("bits", PLANES)
def test_differences_are_the_nearest_representatives(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(0, 2**bits, (2, 40, 1024), generator=generator, dtype=torch.uint8)
    first[:20] = second[:20]
    first[3, 77] = (int(second[3, 77]) + 2 ** (bits - 1)) % 2**bits
    packed = torch.empty((2, 40, 1024 * bits // 8), dtype=torch.uint8)
    pack(first, bits, packed[0])
    pack(second, bits, packed[1])
    out = torch.empty(40, 1024)
    tied = difference(packed[0], packed[1], bits, out)
    half = 2 ** (bits - 1)
    expected = (first.int() - second.int() + half) % 2**bits - half
    assert torch.equal(out, expected.float())
    assert torch.equal(tied, (expected == -half).any(1))
    assert tied[:20].nonzero().view(-1).tolist() == [3]
