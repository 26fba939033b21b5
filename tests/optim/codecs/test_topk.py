from __future__ import annotations

import pytest
import torch

from optim.codecs import PACKINGS


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


def test_positions_that_do_not_ascend_are_refused() -> None:
    payload = PACKINGS["topk12"].pack(torch.randn(4096))
    payload[20:23] = payload[23:26]
    with pytest.raises(ValueError, match="ascend"):
        PACKINGS["topk12"].unpack(payload, 4096)


def test_wrong_unary_parts_are_refused() -> None:
    payload = PACKINGS["topk"].pack(torch.randn(4096))
    for octet in (0, 255):
        bad = payload.clone()
        bad[4 : 4 + 16] = octet
        with pytest.raises(ValueError, match="64 positions"):
            PACKINGS["topk"].unpack(bad, 4096)


@pytest.mark.parametrize(("name", "dtype"), [("topk", torch.bfloat16), ("topk12", torch.float32)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_hostile_levels_are_refused(name: str, dtype: torch.dtype, bad: float) -> None:
    payload = PACKINGS[name].pack(torch.randn(4096))
    payload[: dtype.itemsize] = torch.tensor([bad], dtype=dtype).view(torch.uint8)
    with pytest.raises(ValueError, match="level"):
        PACKINGS[name].unpack(payload, 4096)
