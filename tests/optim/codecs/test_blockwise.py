from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs.blockwise import Int8


def nmse(values: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((decoded - values).double().square().sum() / values.double().square().sum())


def test_int8_costs_8_0625_bits() -> None:
    assert Int8().payload_bytes(256 * 1000) * 8 / 256_000 == 8.0625
    assert Int8().payload_bytes(257) == 257 + 4


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    num_values=st.integers(1, 1000),
    scale=st.sampled_from([1e-36, 1e-8, 1.0, 1e8, 1e25]),
    spikes=st.integers(0, 3),
    seed=st.integers(0, 2**62),
)
def test_int8_error_is_at_most_half_a_step_of_the_block(num_values: int, scale: float, spikes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(num_values, generator=generator)
    values[:spikes] *= 100
    decoded = Int8().unpack(Int8().pack(values), num_values)
    for start in range(0, num_values, 256):
        block = values[start : start + 256]
        bound = block.abs().max() * (1 / 254 + 2**-8)
        assert bool(((decoded[start : start + 256] - block).abs() <= bound).all())


def test_int8_matches_the_error_table() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(1_000_000, generator=generator)
    chi = torch.randn(1_000_000, 4, generator=generator).square().sum(1)
    student = torch.randn(1_000_000, generator=generator) / (chi / 4).sqrt()
    assert nmse(normal, Int8().unpack(Int8().pack(normal), 1_000_000)) == pytest.approx(4.87e-5, rel=0.03)
    assert nmse(student, Int8().unpack(Int8().pack(student), 1_000_000)) == pytest.approx(1.71e-4, rel=0.1)


def test_int8_of_zeros_and_of_values_below_any_scale() -> None:
    assert not Int8().unpack(Int8().pack(torch.zeros(300)), 300).any()
    tiny = torch.full((300,), 1e-45)
    assert float(Int8().unpack(Int8().pack(tiny), 300).abs().max()) <= 1e-40


def test_int8_keeps_signs_and_the_largest_value() -> None:
    values = torch.tensor([2.0, -2.0, 1.0, 0.0])
    assert Int8().unpack(Int8().pack(values), 4).tolist() == pytest.approx([2.0, -2.0, 1.0, 0.0], abs=0.009)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 1e30])
def test_int8_refuses_a_hostile_scale(bad: float) -> None:
    payload = Int8().pack(torch.ones(300))
    payload[:2] = torch.tensor([bad], dtype=torch.bfloat16).view(torch.uint8)
    with pytest.raises(ValueError, match="scale"):
        Int8().unpack(payload, 300)


def test_int8_refuses_the_code_that_is_never_sent() -> None:
    payload = Int8().pack(torch.ones(300))
    payload[-1] = 128
    with pytest.raises(ValueError, match="-128"):
        Int8().unpack(payload, 300)
