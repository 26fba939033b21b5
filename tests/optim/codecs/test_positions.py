from __future__ import annotations

import pytest
import torch

from optim.codecs.positions import largest, pack_elias_fano, pack_plain, unpack_elias_fano, unpack_plain


def random_positions(chunks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(chunks, 4096, generator=generator).argsort(1)[:, :64].sort(1).values


@pytest.mark.parametrize(("pack", "unpack", "size"), [(pack_elias_fano, unpack_elias_fano, 64), (pack_plain, unpack_plain, 96)])
def test_positions_round_trip(pack, unpack, size: int) -> None:  # type: ignore[no-untyped-def]
    ends = torch.stack((torch.arange(64), torch.arange(4032, 4096), torch.arange(64) * 65))
    positions = torch.cat((random_positions(200), ends))
    packed = pack(positions)
    assert packed.shape == (203, size)
    assert torch.equal(unpack(packed), positions)


def test_the_largest_magnitudes_win_and_ties_go_to_the_front() -> None:
    chunk = torch.zeros(1, 4096)
    assert largest(chunk)[0].tolist() == list(range(64))
    chunk[0, 4000:4063] = -5.0
    chunk[0, [9, 4, 7]] = 1.0
    assert largest(chunk)[0].tolist() == [4, *range(4000, 4063)]


@pytest.mark.parametrize("damage", [0, 255, 1])
def test_bytes_that_no_sender_writes_are_refused(damage: int) -> None:
    packed = pack_elias_fano(random_positions(3))
    packed[1, :16] = damage
    with pytest.raises(ValueError, match="64 positions"):
        unpack_elias_fano(packed)


def test_positions_of_one_bucket_must_ascend() -> None:
    packed = pack_elias_fano(torch.arange(64)[None])
    packed[0, 16:] = 0
    with pytest.raises(ValueError, match="ascend"):
        unpack_elias_fano(packed)
    plain = pack_plain(torch.arange(64)[None])
    plain[0, :3] = plain[0, 3:6]
    with pytest.raises(ValueError, match="ascend"):
        unpack_plain(plain)
