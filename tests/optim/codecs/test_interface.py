"""What every codec must hold, whatever it does inside."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.optim.codecs import CODECS, PACKINGS, Codec, Encoded, Gap, codec

SIZES = [1, 2, 3, 127, 128, 255, 256, 257, 1000, 1024, 1025, 4096, 5000]
SCALES = [1e-30, 1e-6, 1e-2, 1.0, 1e4, 1e20]


def exchange(coder: Codec, first: Tensor, second: Tensor, seed: int = 7) -> tuple[Gap, Gap]:
    """Return the gaps that each side finds in the other's message."""
    sketches = coder.sketch(first, seed), coder.sketch(second, seed)
    one = coder.encode(first, seed, sketches[0], sketches[1])
    two = coder.encode(second, seed, sketches[1], sketches[0])
    for sketch, encoded in zip(sketches, (one, two), strict=True):
        assert sketch.dtype == encoded.payload.dtype == torch.uint8
        assert sketch.shape == (coder.sketch_bytes(len(first)),)
        assert encoded.payload.shape == (coder.payload_bytes(len(first)),)
    return coder.gap(one, two.payload), coder.gap(two, one.payload)


def coded(name: str, message: Tensor) -> tuple[Codec, Encoded]:
    """A message as its sender holds it, for a partner with the same one."""
    coder = codec(name)
    sketch = coder.sketch(message, 1)
    return coder, coder.encode(message, 1, sketch, sketch)


def assert_opposite(one: Gap, two: Gap, num_values: int, coder: Codec) -> None:
    assert one.values.shape == (num_values,)
    assert one.values.dtype == torch.float32
    assert bool(torch.isfinite(one.values).all())
    assert one.failed.shape == (coder.num_blocks(num_values),)
    assert torch.equal(one.values, -two.values)
    assert torch.equal(one.failed, two.failed)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=60)
@given(
    num_values=st.one_of(st.sampled_from(SIZES), st.integers(1, 3000)),
    scale=st.sampled_from(SCALES),
    spread=st.sampled_from([0.0, 1e-4, 0.1, 1.0, 50.0]),
    seed=st.integers(0, 2**62),
)
def test_gaps_of_the_two_sides_are_exactly_opposite(name: str, num_values: int, scale: float, spread: float, seed: int) -> None:
    coder = codec(name)
    generator = torch.Generator().manual_seed(seed)
    first = scale * torch.randn(num_values, generator=generator)
    second = first + spread * scale * torch.randn(num_values, generator=generator)
    assert_opposite(*exchange(coder, first, second, seed), num_values, coder)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("num_values", [0, 1, 255, 1024, 1500])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 1e-42, 1e-38, 60000.0, 1e25])
def test_equal_constant_messages_have_no_gap(name: str, num_values: int, value: float) -> None:
    coder = codec(name)
    u = torch.full((num_values,), value)
    one, two = exchange(coder, u, u.clone())
    assert_opposite(one, two, num_values, coder)
    assert not one.values.any()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e35])
def test_a_message_that_is_not_finite_is_refused_by_its_sender(name: str, bad: float) -> None:
    u = torch.zeros(3000)
    u[1234] = bad
    with pytest.raises(ValueError, match="not finite"):
        exchange(codec(name), u, torch.zeros(3000))


@pytest.mark.parametrize("name", CODECS)
def test_payloads_of_another_size_or_type_are_refused(name: str) -> None:
    coder, own = coded(name, torch.randn(2000))
    for bad in (
        own.payload[:-1],
        torch.cat((own.payload, own.payload[:1])),
        own.payload[:0],
        own.payload.to(torch.int8),
        own.payload[None],
    ):
        with pytest.raises(ValueError, match=r"expected|takes"):
            coder.gap(own, bad)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=80)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["random", "ones", "zeros", "flips"]))
def test_any_bytes_of_the_right_size_give_a_finite_gap_or_a_sentence(name: str, seed: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    coder, own = coded(name, 0.02 * torch.randn(1300, generator=generator))
    size = len(own.payload)
    garbage = {
        "random": torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8),
        "ones": torch.full((size,), 255, dtype=torch.uint8),
        "zeros": torch.zeros(size, dtype=torch.uint8),
        "flips": own.payload ^ (torch.rand(size, generator=generator) < 0.01).to(torch.uint8) * 64,
    }[kind]
    try:
        gap = coder.gap(own, garbage)
    except ValueError as error:
        assert str(error).endswith(".")
    else:
        assert bool(torch.isfinite(gap.values).all())


@pytest.mark.parametrize("name", CODECS)
def test_decoding_a_slice_of_a_larger_buffer(name: str) -> None:
    coder, own = coded(name, u := torch.randn(1111))
    sketch = coder.sketch(u, 1)
    partner = coder.encode(u + 0.1, 1, sketch, sketch)
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), partner.payload))[1:]
    assert torch.equal(coder.gap(own, shifted).values, coder.gap(own, partner.payload).values)


@pytest.mark.parametrize("name", PACKINGS)
def test_packing_is_deterministic_and_leaves_its_input_alone(name: str) -> None:
    values = torch.randn(3000)
    copy = values.clone()
    pack = PACKINGS[name]
    payload = pack.pack(values)
    assert torch.equal(payload, pack.pack(copy))
    first = pack.unpack(payload, 3000)
    assert torch.equal(first, pack.unpack(payload.clone(), 3000))
    assert torch.equal(values, copy)


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("num_values", [0, *SIZES])
def test_sizes_follow_from_the_number_of_values(name: str, num_values: int) -> None:
    pack = PACKINGS[name]
    payload = pack.pack(torch.randn(num_values))
    assert payload.shape == (pack.payload_bytes(num_values),)
    assert pack.unpack(payload, num_values).shape == (num_values,)


def test_names_and_wire_ids() -> None:
    assert {name: known.wire_id for name, known in CODECS.items() if known.wire_id <= 2} == {"fp32": 0, "bf16": 1, "int8": 2}
    assert all(known.name == name for name, known in CODECS.items())
    assert len({known.wire_id for known in CODECS.values()}) == len(CODECS)


def test_an_unknown_codec_is_refused_with_suggestions() -> None:
    with pytest.raises(ValueError, match=r"'int9'.*int8"):
        codec("int9")
    with pytest.raises(ValueError, match=r"'zzz'.*fp32"):
        codec("zzz")
