from __future__ import annotations

import pytest
import torch

from optim.codecs import PACKINGS


def test_fp32_is_exact() -> None:
    values = torch.randn(1000)
    assert torch.equal(PACKINGS["fp32"].unpack(PACKINGS["fp32"].pack(values), 1000), values)


def test_fp32_is_little_endian() -> None:
    assert PACKINGS["fp32"].pack(torch.tensor([1.0])).tolist() == [0, 0, 0x80, 0x3F]


def test_bf16_rounds_to_nearest() -> None:
    values = torch.randn(10_000)
    decoded = PACKINGS["bf16"].unpack(PACKINGS["bf16"].pack(values), 10_000)
    assert torch.equal(decoded, values.bfloat16().float())
    assert bool(((decoded - values).abs() <= values.abs() * 2.0**-8).all())


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e36])
def test_numbers_that_are_no_weights_are_refused(name: str, bad: float) -> None:
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    payload = torch.tensor([1.0, bad], dtype=dtype).view(torch.uint8)
    with pytest.raises(ValueError, match="not finite"):
        PACKINGS[name].unpack(payload, 2)
