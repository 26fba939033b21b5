"""Packings one by one; what all codecs must hold stands in test_interface.py."""

from __future__ import annotations

import math
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.optim.codecs import PACKINGS
from gossamer.optim.codecs.packings import LLOYD_LEVELS, NF4_LEVELS, code_bytes, pack_codes, unpack_codes


def round_trip(name: str, values: Tensor) -> Tensor:
    return PACKINGS[name].unpack(PACKINGS[name].pack(values), len(values))


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 1001])
def test_codes_round_trip(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (count,), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (code_bytes(count, bits),)
    assert torch.equal(unpack_codes(packed, bits, count), codes)


def test_the_first_code_is_lowest() -> None:
    assert pack_codes(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist() == [0x21, 0x03]
    assert pack_codes(torch.tensor([1, 2, 3, 0, 1], dtype=torch.uint8), 2).tolist() == [0b00111001, 0b01]
    assert pack_codes(torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1], dtype=torch.uint8), 1).tolist() == [0b1101, 1]


def test_set_bits_after_the_end_are_refused() -> None:
    assert unpack_codes(torch.tensor([0x21, 0x03], dtype=torch.uint8), 4, 3).tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="after its last code"):
        unpack_codes(torch.tensor([0x21, 0x13], dtype=torch.uint8), 4, 3)


def test_fp32_is_exact() -> None:
    values = torch.randn(1000)
    assert torch.equal(round_trip("fp32", values), values)


def test_fp32_is_little_endian() -> None:
    assert PACKINGS["fp32"].pack(torch.tensor([1.0])).tolist() == [0, 0, 0x80, 0x3F]


def test_bf16_rounds_to_nearest() -> None:
    values = torch.randn(10_000)
    decoded = round_trip("bf16", values)
    assert torch.equal(decoded, values.bfloat16().float())
    assert bool(((decoded - values).abs() <= values.abs() * 2.0**-8).all())


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e36])
def test_numbers_that_are_no_weights_are_refused(name: str, bad: float) -> None:
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    payload = torch.tensor([1.0, bad], dtype=dtype).view(torch.uint8)
    with pytest.raises(ValueError, match="not finite"):
        PACKINGS[name].unpack(payload, 2)


@settings(max_examples=100)
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
    decoded = round_trip("int8", values)
    for start in range(0, num_values, 256):
        block = values[start : start + 256]
        bound = block.abs().max() * (1 / 254 + 2**-8)
        assert bool(((decoded[start : start + 256] - block).abs() <= bound).all())


def test_int8_of_zeros_and_of_values_below_any_scale() -> None:
    assert not round_trip("int8", torch.zeros(300)).any()
    tiny = torch.full((300,), 1e-45)
    assert float(round_trip("int8", tiny).abs().max()) <= 1e-40


def test_int8_keeps_signs_and_the_largest_value() -> None:
    values = torch.tensor([2.0, -2.0, 1.0, 0.0])
    assert round_trip("int8", values).tolist() == pytest.approx([2.0, -2.0, 1.0, 0.0], abs=0.009)


def test_int8_refuses_the_code_that_is_never_sent() -> None:
    payload = PACKINGS["int8"].pack(torch.ones(300))
    payload[-1] = 128
    with pytest.raises(ValueError, match="-128"):
        PACKINGS["int8"].unpack(payload, 300)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8.0625), ("nf4", 4.125), ("q2", 2.125), ("sign1", 1.125)])
def test_bits_per_value(name: str, bits: float) -> None:
    assert PACKINGS[name].payload_bytes(256 * 1000) * 8 / 256_000 == bits


def test_e3m0_costs_four_bits_and_one_scale() -> None:
    assert PACKINGS["e3m0"].payload_bytes(1000) == 504


def test_nf4_names_its_own_levels_exactly() -> None:
    values = torch.tensor(NF4_LEVELS) * 0.5
    assert torch.equal(round_trip("nf4", values), values)
    assert PACKINGS["nf4"].pack(values)[2:].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]


def test_nf4_of_zeros_is_code_7() -> None:
    payload = PACKINGS["nf4"].pack(torch.zeros(4))
    assert payload.tolist() == [0, 0, 0x77, 0x77]


def test_a_value_on_an_edge_takes_the_lower_level() -> None:
    # The edge between the last two levels, exact in f32.
    edge = float((torch.tensor(NF4_LEVELS)[14] + torch.tensor(NF4_LEVELS)[15]) / 2)
    values = torch.tensor([1.0, edge, math.nextafter(edge, 2.0) + 1e-6])
    assert round_trip("nf4", values).tolist() == pytest.approx([1.0, NF4_LEVELS[14], 1.0])


def test_q2_uses_lloyds_levels_of_the_root_mean_square() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(128, generator=generator)
    scale = float(values.square().mean().sqrt().bfloat16())
    levels = sorted(set((round_trip("q2", values) / scale).tolist()))
    assert levels == pytest.approx(LLOYD_LEVELS, rel=1e-6)


def test_short_last_blocks_are_scaled_by_their_own_values() -> None:
    values = torch.full((130,), 0.5)
    assert round_trip("sign1", values).tolist() == [0.5] * 130
    assert round_trip("q2", values)[-1] == pytest.approx(0.5 * 1.5104, rel=0.01)


def test_sign1_keeps_signs_and_mean_magnitudes() -> None:
    values = torch.tensor([1.0, -3.0, 2.0, -2.0])
    assert round_trip("sign1", values).tolist() == [2.0, -2.0, 2.0, -2.0]


def test_e3m0_rounds_to_the_nearest_power_of_two_of_the_largest() -> None:
    values = torch.tensor([8.0, -4.0, 3.01, 2.99, 1.0, -0.126, 0.0, 0.05])
    assert round_trip("e3m0", values).tolist() == [8.0, -4.0, 4.0, 2.0, 1.0, -0.125, 0.0, 0.0]


def test_e3m0_leaves_zeros_zero() -> None:
    values = torch.zeros(1000)
    values[3] = 1.0
    assert torch.equal(round_trip("e3m0", values), values)


@pytest.mark.parametrize("name", ["int8", "nf4", "q2", "sign1"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 1e30])
def test_hostile_scales_are_refused(name: str, bad: float) -> None:
    payload = PACKINGS[name].pack(torch.ones(300))
    payload[:2] = torch.tensor([bad], dtype=torch.bfloat16).view(torch.uint8)
    with pytest.raises(ValueError, match="scale"):
        PACKINGS[name].unpack(payload, 300)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 1e30])
def test_hostile_tensor_scales_are_refused(bad: float) -> None:
    payload = PACKINGS["e3m0"].pack(torch.ones(300))
    payload[:4] = torch.tensor([bad]).view(torch.uint8)
    with pytest.raises(ValueError, match="scale"):
        PACKINGS["e3m0"].unpack(payload, 300)


@pytest.mark.parametrize("name", ["nf4", "q2", "sign1", "e3m0"])
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-8, 1e8, 1e24])
def test_tiny_and_huge_values_keep_their_shape(name: str, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(512, generator=generator).clamp(-3, 3) * scale
    decoded = round_trip(name, values)
    assert bool(torch.isfinite(decoded).all())
    if scale > 1e-40:
        assert float(decoded.double() @ values.double()) > 0.7 * float(decoded.double().norm() * values.double().norm())


# NMSE on N(0,1) and on Student-t(4), one million values.
ERROR_TABLE = {
    "int8": (4.87e-5, 1.71e-4),
    "nf4": (9.13e-3, 1.66e-2),
    "e3m0": (3.81e-2, 4.96e-2),
    "q2": (0.1160, 0.221),
    "sign1": (0.361, 0.497),
}


@pytest.mark.parametrize("name", ERROR_TABLE)
@pytest.mark.parametrize("student", [False, True])
def test_errors_match_the_table(name: str, student: bool) -> None:
    errors = []
    # One tensor's largest value sets e3m0's scale, and Student-t draws of it differ by 4x: the median of five draws is compared.
    for seed in range(5 if student else 1):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(1_000_000, generator=generator)
        if student:
            values /= (torch.randn(1_000_000, 4, generator=generator).square_().sum(1) / 4).sqrt_()
        lost = round_trip(name, values).sub_(values)
        errors.append(float(lost.double().square().sum() / values.double().square().sum()))
    assert median(errors) == pytest.approx(ERROR_TABLE[name][student], rel=0.03)


@pytest.mark.parametrize("name", [name for name in PACKINGS if name != "fp32"])
@pytest.mark.parametrize("kind", ["normal", "one", "sparse", "heavy", "constant"])
def test_every_packing_is_contractive(name: str, kind: str) -> None:
    """||C(x) - x||^2 <= (1 - d) ||x||^2 with d > 0: what error feedback needs to converge (MASHA's contract, arXiv 2110.03313)."""
    generator = torch.Generator().manual_seed(4)
    values = {
        "normal": torch.randn(9000, generator=generator),
        "one": torch.nn.functional.one_hot(torch.tensor(77), 9000).float(),
        "sparse": torch.randn(9000, generator=generator) * (torch.rand(9000, generator=generator) < 0.01),
        "heavy": torch.randn(9000, generator=generator) / torch.randn(9000, generator=generator).abs(),
        "constant": torch.full((9000,), -0.3),
    }[kind]
    lost = (round_trip(name, values) - values).square().sum()
    least = {"sign1": 1 / 129, "q2": 1 / 129}.get(name, 0.9)
    assert float(lost) <= (1 - least) * float(values.square().sum())
