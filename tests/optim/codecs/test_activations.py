from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.optim.codecs.activations import ACTIVATIONS
from gossamer.optim.codecs.hadamard import sign_pool
from tests.optim.codecs import activation_reference as oracle

NAMES = list(ACTIVATIONS)
LARGEST = {"int8": 127, "int4": 7}


def round_trip(name: str, values: Tensor) -> Tensor:
    return ACTIVATIONS[name].unpack(ACTIVATIONS[name].pack(values), len(values))


def drawn(num_values: int, scale: float, spikes: int, seed: int) -> Tensor:
    values = scale * torch.randn(num_values, generator=torch.Generator().manual_seed(seed))
    values[:spikes] *= 100
    return values


some_values = st.builds(
    drawn,
    num_values=st.integers(1, 300),
    scale=st.sampled_from([0.0, 1e-36, 1e-9, 1.0, 1e8, 1e25]),
    spikes=st.integers(0, 3),
    seed=st.integers(0, 2**62),
)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("fp32", {0: 0, 1: 4, 64: 256, 768: 3072}),
        ("bf16", {0: 0, 1: 2, 64: 128, 768: 1536}),
        ("int8", {0: 0, 1: 3, 64: 66, 65: 69, 768: 792}),
        ("int4", {0: 0, 1: 34, 64: 34, 65: 68, 768: 408}),
    ],
)
def test_sizes_follow_from_the_number_of_values(name: str, sizes: dict[int, int]) -> None:
    for num_values, num_bytes in sizes.items():
        assert ACTIVATIONS[name].payload_bytes(num_values) == num_bytes
        assert ACTIVATIONS[name].pack(torch.randn(num_values)).shape == (num_bytes,)
        assert round_trip(name, torch.randn(num_values)).shape == (num_values,)


def test_fp32_is_exact_and_bf16_the_nearest() -> None:
    values = torch.randn(1000)
    assert torch.equal(round_trip("fp32", values), values)
    assert torch.equal(round_trip("bf16", values), values.bfloat16().float())


@pytest.mark.parametrize("name", list(LARGEST))
@settings(max_examples=60)
@given(values=some_values)
def test_decoded_values_are_those_of_the_oracle(name: str, values: Tensor) -> None:
    signs = sign_pool(0, 1, torch.device("cpu"))[:64].tolist()
    decoded, num_other_codes = round_trip(name, values), 0
    for part, found in zip(values.split(64), decoded.split(64), strict=True):
        block, largest = part.tolist(), float(part.abs().max())
        expected = oracle.int8(block) if name == "int8" else oracle.int4(block, signs)
        away = max(abs(one - other) for one, other in zip(found.tolist(), expected, strict=True))
        assert away <= 1.01 * largest * (1 / 127 if name == "int8" else 8 / 7) + 1e-38
        num_other_codes += away > 1e-5 * largest + 1e-38
    assert num_other_codes <= 1  # in f32, a value half-way between two codes may take the other one


@settings(max_examples=60)
@given(values=some_values)
def test_int8_is_off_by_half_a_step_at_most(values: Tensor) -> None:
    off = (round_trip("int8", values) - values).abs()
    for part, errors in zip(values.split(64), off.split(64), strict=True):
        assert float(errors.max()) <= float(part.abs().max()) * (1 / 254 + 2.0**-8) + 1e-38


@settings(max_examples=60)
@given(values=some_values)
def test_int4_loses_a_bounded_share_of_a_block(values: Tensor) -> None:
    off = round_trip("int4", values) - values
    for part, errors in zip(values.split(64), off.split(64), strict=True):
        # Orthogonal: the error of the rotated block is as long. Each of its 64 values is off by half a step, and a step is at most
        # the block's length over 7.
        longest = float(part.double().norm()) * (1 + 2.0**-7)
        assert float(errors.double().norm()) <= 8 * (longest / 14 + longest * 2.0**-8) + 1e-37


def test_int4_spreads_an_outlier() -> None:
    values = torch.randn(64 * 256, generator=torch.Generator().manual_seed(0))
    values[::64] *= 40
    plain = torch.cat([torch.tensor(oracle.decoded_block(block.tolist(), 7)) for block in values.split(64)])
    lost, lost_unrotated = ((one - values).view(-1, 64)[:, 1:].norm() for one in (round_trip("int4", values), plain))
    assert float(lost) < 0.7 * float(lost_unrotated)
    normal = torch.randn(64 * 256, generator=torch.Generator().manual_seed(1))
    assert float((round_trip("int4", normal) - normal).norm() / normal.norm()) < 0.12


def test_zeros_stay_zeros_and_small_gradients_are_kept() -> None:
    for name in NAMES:
        assert not round_trip(name, torch.zeros(130)).any()
        tiny = torch.full((64,), 1e-12)
        assert float((round_trip(name, tiny) / tiny - 1).abs().max()) < 0.3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e36])
def test_values_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    values = torch.zeros(100)
    values[70] = bad
    with pytest.raises(ValueError, match="not finite"):
        ACTIVATIONS[name].pack(values)


@pytest.mark.parametrize("name", NAMES)
def test_payloads_of_another_size_are_refused(name: str) -> None:
    payload = ACTIVATIONS[name].pack(torch.randn(128))
    for wrong in (payload[:-1], torch.cat((payload, payload[:1])), payload.view(torch.int8)):
        with pytest.raises(ValueError, match="was expected"):
            ACTIVATIONS[name].unpack(wrong, 128)


@pytest.mark.parametrize(("name", "place", "byte"), [("int8", 2, 0x80), ("int4", 2, 0x08), ("int4", 2, 0x80)])
def test_codes_that_are_never_sent_are_refused(name: str, place: int, byte: int) -> None:
    payload = ACTIVATIONS[name].pack(torch.randn(64))
    payload[place] = byte
    with pytest.raises(ValueError, match="which is never sent"):
        ACTIVATIONS[name].unpack(payload, 64)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf, 1e30])
def test_scales_that_are_never_sent_are_refused(name: str, scale: float) -> None:
    payload = ACTIVATIONS[name].pack(torch.randn(64))
    payload[:2] = torch.tensor([scale], dtype=torch.bfloat16).view(torch.uint8)
    with pytest.raises(ValueError, match="negative, not finite, or far too large"):
        ACTIVATIONS[name].unpack(payload, 64)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(data=st.data(), num_values=st.integers(1, 130))
def test_any_bytes_are_refused_or_finite(name: str, data: st.DataObject, num_values: int) -> None:
    size = ACTIVATIONS[name].payload_bytes(num_values)
    payload = torch.frombuffer(bytearray(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    try:
        values = ACTIVATIONS[name].unpack(payload, num_values)
    except ValueError:
        return
    assert values.shape == (num_values,)
    assert bool(values.isfinite().all())
