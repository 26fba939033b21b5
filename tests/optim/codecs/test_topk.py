from __future__ import annotations

import pytest
import torch

from gossamer.optim.codecs import PACKINGS
from gossamer.optim.codecs.topk import largest_places, pack_elias_fano, pack_plain, unpack_elias_fano, unpack_plain


def test_bits_per_value() -> None:
    assert PACKINGS["topk"].payload_bytes(4096 * 100) * 8 / 409_600 == 672 / 4096
    assert PACKINGS["topk12"].payload_bytes(4096 * 100) * 8 / 409_600 == pytest.approx(0.21875, abs=5e-4)


@pytest.mark.parametrize("name", ["topk", "topk12"])
def test_only_the_largest_are_kept_with_their_signs(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4096 * 3, generator=generator)
    decoded = PACKINGS[name].unpack(PACKINGS[name].pack(values), len(values))
    kept = decoded != 0
    assert kept.view(3, -1).sum(1).tolist() == [64, 64, 64]
    assert bool((decoded[kept].sign() == values[kept].sign()).all())
    assert float(values[kept].abs().min()) > 1.8


def test_topk_sends_the_means_of_small_and_large() -> None:
    values = torch.zeros(4096)
    values[:64:2], values[1:64:2] = 1.0, -3.0
    decoded = PACKINGS["topk"].unpack(PACKINGS["topk"].pack(values), 4096)
    assert torch.equal(decoded, values)


def test_topk12_uses_one_table_for_all() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4096 * 4, generator=generator)
    decoded = PACKINGS["topk12"].unpack(PACKINGS["topk12"].pack(values), len(values))
    assert len(set(decoded[decoded != 0].tolist())) <= 4


@pytest.mark.parametrize("name", ["topk", "topk12"])
def test_what_falls_in_the_padding_is_dropped(name: str) -> None:
    values = torch.randn(4096 + 10)
    decoded = PACKINGS[name].unpack(PACKINGS[name].pack(values), len(values))
    assert decoded.shape == (4106,)
    assert float((decoded[4096:] * values[4096:]).sum()) > 0


@pytest.mark.parametrize(("name", "dtype"), [("topk", torch.bfloat16), ("topk12", torch.float32)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_hostile_levels_are_refused(name: str, dtype: torch.dtype, bad: float) -> None:
    payload = PACKINGS[name].pack(torch.randn(4096))
    payload[: dtype.itemsize] = torch.tensor([bad], dtype=dtype).view(torch.uint8)
    with pytest.raises(ValueError, match="level"):
        PACKINGS[name].unpack(payload, 4096)


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
    assert largest_places(chunk)[0].tolist() == list(range(64))
    chunk[0, 4000:4063] = -5.0
    chunk[0, [9, 4, 7]] = 1.0
    assert largest_places(chunk)[0].tolist() == [4, *range(4000, 4063)]


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
