from __future__ import annotations

import pytest
import torch

from gossamer.optim.codecs import CODECS, codec
from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.fragments import Fragment, Piece

pytestmark = pytest.mark.usefixtures("coding")


def fragment(coded: int, plain: int) -> Fragment:
    pieces = [Piece("large", coded)] * bool(coded) + [Piece("small", plain)] * bool(plain)
    return Fragment(3, "test", tuple(pieces), coded)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("coded", "plain"), [(5000, 65), (5000, 0), (0, 65), (4097, 1)])
def test_sizes_are_the_codecs_plus_fp32(name: str, coded: int, plain: int) -> None:
    coder = FragmentCodec(fragment(coded, plain), codec(name))
    assert coder.payload_bytes == codec(name).payload_bytes(coded) + 4 * plain
    assert coder.sketch_bytes == codec(name).sketch_bytes(coded)
    u = torch.randn(coded + plain)
    sketch = coder.sketch(u, 5)
    own = coder.encode(u, 5, sketch, sketch)
    assert own.payload.shape == (coder.payload_bytes,)
    gap = coder.gap(own, own.payload.clone())
    assert gap.values.shape == (coded + plain,)
    assert not gap.values.any()


def test_small_tensors_cross_exactly() -> None:
    coder = FragmentCodec(fragment(5000, 65), codec("int8"))
    u, v = torch.randn(5065), torch.randn(5065)
    none = coder.sketch(u, 5)
    gap = coder.gap(coder.encode(u, 5, none, none), coder.encode(v, 5, none, none).payload)
    assert torch.equal(gap.values[5000:], v[5000:] - u[5000:])
    assert not torch.equal(gap.values[:5000], v[:5000] - u[:5000])


def test_a_payload_of_another_size_is_refused() -> None:
    coder = FragmentCodec(fragment(5000, 65), codec("int8"))
    u = torch.randn(5065)
    own = coder.encode(u, 5, u[:0], u[:0])
    with pytest.raises(ValueError, match="takes"):
        coder.gap(own, own.payload[:-4])


def test_bits_per_value_count_everything_sent() -> None:
    assert FragmentCodec(fragment(256_000, 0), codec("int8")).payload_bytes * 8 / 256_000 == 8.0625


def test_no_failed_blocks_is_none() -> None:
    coder = FragmentCodec(fragment(5000, 65), codec("int8"))
    assert coder.failed_values(torch.zeros(0, dtype=torch.bool)) is None
    with pytest.raises(ValueError, match="has 0 blocks"):
        coder.failed_values(torch.zeros(1, dtype=torch.bool))
