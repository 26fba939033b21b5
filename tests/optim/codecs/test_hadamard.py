from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gossamer.optim.codecs import codec
from gossamer.optim.codecs.hadamard import dither_pool, keep_products_exact, leading_columns, sign_pool, transform, window

CPU = torch.device("cpu")


def slow_transform(values: list[float]) -> list[float]:
    """The textbook butterfly."""
    values = list(values)
    stride = 1
    while stride < len(values):
        for start in range(0, len(values), 2 * stride):
            for k in range(start, start + stride):
                values[k], values[k + stride] = values[k] + values[k + stride], values[k] - values[k + stride]
        stride *= 2
    return values


def test_it_is_the_walsh_hadamard_transform() -> None:
    rows = torch.randint(-5, 6, (3, 1024)).float()
    expected = torch.tensor([slow_transform(row) for row in rows.tolist()])
    assert torch.equal(transform(rows.clone(), torch.empty_like(rows)), expected)
    assert torch.equal(leading_columns(rows, 8), expected[:, :8])


def test_twice_is_1024_times_the_input_exactly_on_integers() -> None:
    rows = torch.randint(-8, 8, (50, 1024)).float()
    twice = transform(transform(rows.clone(), torch.empty_like(rows)), torch.empty_like(rows))
    assert torch.equal(twice, 1024 * rows)


def test_lengths_are_kept_and_a_spike_is_spread_evenly() -> None:
    rows = torch.randn(10, 1024)
    rotated = transform(rows.clone(), torch.empty_like(rows)) / 32
    torch.testing.assert_close(rotated.norm(dim=1), rows.norm(dim=1))
    spike = torch.zeros(1, 1024)
    spike[0, 77] = 32.0
    assert torch.equal(transform(spike.clone(), torch.empty_like(spike)).abs(), torch.full((1, 1024), 32.0))


def test_signs_and_dither_are_shared_by_seed_and_differ_between_blocks() -> None:
    signs, dither = sign_pool(5, 100, CPU), dither_pool(5, 100, CPU)
    assert torch.equal(signs, sign_pool(5, 100, CPU))
    assert not torch.equal(signs, sign_pool(6, 100, CPU))
    rows = window(signs, slice(0, 100))
    assert rows.shape == (100, 1024)
    assert torch.equal(window(signs, slice(40, 47)), rows[40:47])
    assert set(signs.tolist()) == {1.0, -1.0}
    products = rows @ rows.T / 1024
    assert float((products - torch.eye(100)).abs().max()) < 0.2
    assert abs(float(signs.mean())) < 0.1
    assert abs(float(dither.mean())) < 0.05
    assert float(dither.abs().max()) < 0.5
    assert float(dither.square().mean()) == pytest.approx(1 / 12, rel=0.1)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_shared_randomness_is_the_same_on_a_gpu() -> None:
    for pool in (sign_pool, dither_pool):
        assert torch.equal(pool(3, 5000, torch.device("cuda")).cpu(), pool(3, 5000, CPU))


def test_shared_randomness_is_the_same_in_every_release() -> None:
    assert sign_pool(1, 1, CPU)[:8].tolist() == [1, 1, -1, 1, -1, -1, 1, -1]
    assert dither_pool(1, 1, CPU)[:3].tolist() == pytest.approx([-0.4225693, 0.207695, -0.3504562], abs=1e-7)


@pytest.fixture(params=["all at once", "by kind"])
def fast_products(request: pytest.FixtureRequest) -> Iterator[None]:
    """Allow the process products of fewer bits, in one of torch's two ways to say so."""
    details = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [detail.fp32_precision for detail in details]
    if request.param == "by kind":
        details[0].fp32_precision, details[1].fp32_precision = "tf32", "bf16"
    else:
        torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")
    for detail, value in zip(details, before, strict=True):
        detail.fp32_precision = value


@pytest.mark.usefixtures("fast_products")
def test_a_process_that_allows_fast_products_is_refused_until_it_keeps_them_exact() -> None:
    message, coder = torch.randn(3000), codec("modulo4")
    with pytest.raises(RuntimeError, match="keep_products_exact"):
        coder.sketch(message, 1)
    keep_products_exact()
    sketch = coder.sketch(message, 1)
    coder.encode(message, 1, sketch, sketch)
    rows = torch.randint(-8, 8, (64, 1024)).float()
    once = transform(rows.clone(), torch.empty_like(rows))
    assert torch.equal(transform(once, torch.empty_like(once)) / 1024, rows)
