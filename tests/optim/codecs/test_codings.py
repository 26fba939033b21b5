"""torch, compiled.c and Triton: a pair merges the same whatever either side uses, and each codes as float64 and whole numbers say.

Every test runs with the forms that this installation has, so with torch alone where there is neither a C compiler nor a GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.optim.codecs import Gap
from gossamer.optim.codecs.checks import weights
from gossamer.optim.codecs.hadamard import dither_pool, hadamard_matrix, sign_pool, window
from gossamer.optim.codecs.modulo import Modulo, ModuloEncoded
from gossamer.optim.codecs.planes import unpack
from tests.optim.codecs.test_modulo import NAMES, modulo
from tests.optim.codings import CODINGS, CPU, NATIVE, coded_by, device_of, examples

SEED = 5
SIZES = st.one_of(st.integers(1, 5000), st.sampled_from([1023, 1024, 1025, 4096]))
SCALES = st.sampled_from([0.0, 2.0**-149, 1e-40, 1e-20, 1e-3, 0.02, 1.0, 1e10, 1e26])  # denormal to nearly too large
SPREADS = st.sampled_from([0.0, 1e-6, 1e-2, 1.0, 30.0])
PROPERTY = settings(max_examples=examples(60))


def drawn(size: int, scale: float, seed: int) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def whole(size: int, seed: int, most: int = 2**13) -> Tensor:
    """Multiples of 2^-20 whose sums over a block are exact in f32, in any order."""
    return torch.randint(-most, most + 1, (size,), generator=torch.Generator().manual_seed(seed)).float() * 2.0**-20


def rotated(message: Tensor) -> Tensor:
    """The rotation in float64, not normalized: f64[blocks, 1024]."""
    count = -(-len(message) // 1024)
    rows = torch.zeros(count * 1024, dtype=torch.float64)
    rows[: len(message)] = message.double()
    side = hadamard_matrix(CPU).double()
    return (side @ (rows.view(count, 1024) * window(sign_pool(SEED, count, CPU), slice(0, count))).view(-1, 32, 32) @ side).view(
        count, 1024
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


class Side:
    """One side of a meeting, by one form of coding. What it returns lies on the CPU."""

    def __init__(self, coding: str, coder: Modulo, message: Tensor) -> None:
        self.coding, self.coder, self.message = coding, coder, message.to(device_of(coding))
        with coded_by(coding):
            self.sketch = coder.sketch(self.message, SEED).cpu()

    def encode(self, partner_sketch: Tensor) -> ModuloEncoded:
        with coded_by(self.coding):
            self.encoded = placed(self.coder.encode(self.message, SEED, self.sketch, partner_sketch), CPU)
        return self.encoded

    def gap(self, payload: Tensor) -> Gap:
        with coded_by(self.coding):
            gap = self.coder.gap(placed(self.encoded, device_of(self.coding)), payload, room=3)
        return Gap(gap.values.cpu(), gap.failed.cpu())


def placed(encoded: ModuloEncoded, device: torch.device) -> ModuloEncoded:
    payload, sums, steps, signs = (tensor.to(device) for tensor in (encoded.payload, encoded.sums, encoded.steps, encoded.signs))
    return ModuloEncoded(payload, encoded.num_values, sums, steps, signs)


def met(one: Side, two: Side) -> tuple[Gap, Gap]:
    first, second = one.encode(two.sketch), two.encode(one.sketch)
    return one.gap(second.payload), two.gap(first.payload)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first", CODINGS)
@pytest.mark.parametrize("second", CODINGS)
@given(SIZES, SCALES, SPREADS, st.integers(0, 1000))
@PROPERTY
def test_a_pair_ends_with_opposite_gaps_bit_for_bit(
    name: str, first: str, second: str, size: int, scale: float, spread: float, seed: int
) -> None:
    own = drawn(size, scale, seed)
    partner = own + drawn(size, scale * spread, seed + 1)
    one, two = met(Side(first, modulo(name), own), Side(second, modulo(name), partner))
    assert torch.equal(one.values[:size], -two.values[:size])
    assert torch.equal(one.failed, two.failed)
    assert bool(torch.isfinite(one.values[:size]).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("coding", NATIVE)
@given(SIZES, st.integers(0, 1000), st.sampled_from([0, 1, 40, 2**13]))
@PROPERTY
def test_codes_and_sums_are_the_same_where_f32_adds_exactly(name: str, coding: str, size: int, seed: int, most: int) -> None:
    own, partner = whole(size, seed), whole(size, seed)
    partner[::3] += whole(size, seed + 1, most)[::3] / 2
    (one, two), by_torch = ([Side(form, modulo(name), message) for message in (own, partner)] for form in (coding, "torch"))
    assert torch.equal(one.sketch, by_torch[0].sketch)
    encoded, reference = one.encode(two.sketch), by_torch[0].encode(by_torch[1].sketch)
    assert torch.equal(encoded.payload, reference.payload)
    assert torch.equal(encoded.sums, reference.sums)
    assert same_bits(encoded.steps, reference.steps)
    assert same_bits(encoded.signs, reference.signs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("coding", CODINGS)
@given(SIZES, SCALES, st.sampled_from([1e-3, 1e-2, 1.0]), st.integers(0, 1000))
@PROPERTY
def test_codes_are_the_nearest_integers_of_float64(name: str, coding: str, size: int, scale: float, spread: float, seed: int) -> None:
    """To within the rounding of f32 sums: there either neighbour is a code, and the check counts the one that was sent."""
    coder, own = modulo(name), drawn(size, scale, seed)
    one, two = Side(coding, coder, own), Side(coding, coder, own + drawn(size, scale * spread, seed + 1))
    encoded = one.encode(two.sketch)
    exact, count = rotated(own), len(encoded.sums)
    steps = encoded.steps.double()[:, None]
    wanted = exact / (32 * steps) + window(dither_pool(SEED, count, CPU), slice(0, count))
    added = torch.zeros(count * 1024, dtype=torch.float64)
    added[:size] = own.abs().double()
    slack = 64 * 2.0**-24 * added.view(count, 1024).sum(1, keepdim=True) / (32 * steps) + 4 * 2.0**-24 * wanted.abs() + 2.0**-24
    fits = (wanted.abs() + 2 * slack < 2.0**21).all(1) & (slack < 1.0).all(1)  # else the number is no integer of the window's scale
    window_size = 2**coder.bits
    codes = unpack(coder.codes(encoded.payload), coder.bits).double()
    away = torch.remainder(codes - wanted + window_size / 2, window_size) - window_size / 2
    assert bool((away.abs() <= 0.5 + slack)[fits].all())
    numbers = (wanted + away).round().long() + 0x4B400000
    sums = ((numbers * weights(CPU).long()).sum(1) + 2**31) % 2**32 - 2**31
    assert torch.equal(sums[fits], encoded.sums.long()[fits])
    sent = (encoded.sums.long() >> coder.bits) % 65536
    assert torch.equal(coder.checks(encoded.payload).long() % 65536, sent)


@pytest.mark.parametrize("coding", CODINGS)
@given(SIZES, SCALES, st.integers(0, 1000))
@PROPERTY
def test_a_sketch_is_the_start_of_the_rotation(coding: str, size: int, scale: float, seed: int) -> None:
    message = drawn(size, scale, seed)
    sketch = Side(coding, modulo("modulo4"), message).sketch.view(torch.float16).view(-1, 8).double()
    exact = (rotated(message)[:, :8] / 32).clamp(-65504, 65504)
    slack = 2.0**-10 * exact.abs() + 2.0**-24 + 64 * 2.0**-24 * float(message.double().abs().sum()) / 32
    assert bool(((sketch - exact).abs() <= slack).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("coding", NATIVE)
@given(st.integers(0, 40), st.binary(min_size=1, max_size=64), st.integers(0, 1000), st.sampled_from([0, 1]))
@PROPERTY
def test_any_payload_decodes_to_the_same_bits(name: str, coding: str, kept: int, pattern: bytes, seed: int, offset: int) -> None:
    """Also one that no honest partner sends: ties, wrong checks, single flipped codes, at any address."""
    coder, size = modulo(name), 3000
    own = drawn(size, 0.02, seed)
    one = Side("torch", coder, own)
    near = Side("torch", coder, own + drawn(size, 1e-3, seed + 1))
    one.encode(near.sketch)
    payload = torch.empty(coder.payload_bytes(size) + 1, dtype=torch.uint8)[offset : coder.payload_bytes(size) + offset]
    payload[:] = near.encode(one.sketch).payload
    noise = torch.frombuffer(bytearray(pattern * (len(payload) // len(pattern) + 1)), dtype=torch.uint8)[: len(payload)]
    start = kept * len(payload) // 40
    payload[start:] ^= noise[start:]
    reference, one.coding = one.gap(payload), coding
    gap = one.gap(payload)
    assert same_bits(gap.values[:size], reference.values[:size])
    assert torch.equal(gap.failed, reference.failed)
    assert gap.values.shape == (size + 3,)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("coding", CODINGS)
def test_a_gap_is_whole_numbers_rotated_back_and_scaled_once(name: str, coding: str) -> None:
    coder, size = modulo(name), 20 * 1024
    own = drawn(size, 0.02, 1)
    one, two = Side(coding, coder, own), Side(coding, coder, own + drawn(size, 1e-3, 2))
    gap = met(one, two)[0]
    half, count = 2 ** (coder.bits - 1), 20
    theirs, ours = (unpack(coder.codes(side.encoded.payload), coder.bits).long() for side in (two, one))
    side = hadamard_matrix(CPU).double()
    differences = (side @ ((theirs - ours + half) % (2 * half) - half).view(-1, 32, 32).double() @ side).view(count, 1024)
    plain = ~(gap.failed | (coder.checks(two.encoded.payload).long() % 65536 != expected_checks(coder, one, theirs - ours)))
    values = differences.float() * (one.encoded.steps / 32)[:, None] * window(one.encoded.signs, slice(0, count))
    assert int(plain.sum()) > count // 2
    assert same_bits(gap.values[:size].view(count, 1024)[plain], values[plain])


def expected_checks(coder: Modulo, own: Side, differences: Tensor) -> Tensor:
    """The checks that a partner sends whose differences all fit the window."""
    half = 2 ** (coder.bits - 1)
    near = (differences + half) % (2 * half) - half
    sums = own.encoded.sums.long() + (near * weights(CPU).long()).sum(1)
    return (sums >> coder.bits) % 65536


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("place", [0, 1023, 2999])
def test_a_message_that_is_not_finite_or_too_large_is_refused(coding: str, bad: float, place: int) -> None:
    message = drawn(3000, 0.02, 1)
    message[place] = bad
    with coded_by(coding), pytest.raises(ValueError, match="not finite, or far too large"):
        modulo("modulo4").sketch(message.to(device_of(coding)), SEED)


@pytest.mark.parametrize("coding", CODINGS)
def test_a_message_may_be_every_second_value_of_another(coding: str) -> None:
    both = drawn(6000, 0.02, 1).to(device_of(coding))
    apart, together = (Side(coding, modulo("modulo4"), message) for message in (both[::2], both[::2].clone()))
    assert torch.equal(apart.sketch, together.sketch)
    assert torch.equal(apart.encode(apart.sketch).payload, together.encode(together.sketch).payload)
