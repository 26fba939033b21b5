from __future__ import annotations

import pytest
import torch

from gossamer.optim.codecs.sketches import quantization_steps, to_bytes


def test_zero_sketches_give_a_usable_step() -> None:
    nothing = torch.zeros(32, dtype=torch.uint8)
    steps = quantization_steps(nothing, nothing, 2, 0.5)
    assert bool((steps > 0).all())
    assert bool(torch.isfinite(1.0 / steps).all())


def test_both_sides_compute_the_same_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    sketches = [(torch.randn(8000, generator=generator) * scale).half().view(torch.uint8) for scale in (1e-3, 1e4)]
    one, two = quantization_steps(*sketches, 1000, 0.6875), quantization_steps(*sketches[::-1], 1000, 0.6875)
    assert torch.equal(one, two)
    assert bool(torch.isfinite(one).all())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("scale", [0.0, 1e-7, 1e-3, 1.0, 6e4])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.5])
def test_a_gpu_computes_the_same_steps(scale: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    own = torch.rand(100_000, 8, generator=generator) * scale
    partner = own * (1.0 - spread * torch.rand(100_000, 8, generator=generator))
    sketches = to_bytes(own), to_bytes(partner)
    here, there = quantization_steps(*sketches, 100_000, 0.6875), quantization_steps(sketches[0].cuda(), sketches[1], 100_000, 0.6875)
    assert there.is_cuda
    assert torch.equal(here, there.cpu())


def test_the_step_follows_the_block_and_its_neighbours() -> None:
    own = torch.zeros(40, 8)
    partner = torch.full((40, 8), 0.01)
    even = quantization_steps(to_bytes(own.clone()), to_bytes(partner.clone()), 40, 1.0)
    torch.testing.assert_close(even, torch.full((40,), 0.01), rtol=1e-3, atol=0)
    partner[20] = 1.0
    steps = quantization_steps(to_bytes(own), to_bytes(partner), 40, 1.0)
    assert float(steps[20]) == pytest.approx((0.25 + 0.75 / 9) ** 0.5, rel=1e-3)
    assert float(steps[16]) == pytest.approx((0.75 / 9) ** 0.5, rel=1e-2)
    assert torch.equal(steps[:16], even[:16])


def test_the_step_never_falls_below_what_fp16_shows() -> None:
    own = torch.full((20, 8), 4.0)
    steps = quantization_steps(to_bytes(own.clone()), to_bytes(own.clone()), 20, 1.0)
    torch.testing.assert_close(steps, torch.full((20,), 4.0 * 2**-11.5), rtol=1e-3, atol=0)


def test_values_outside_fp16_are_clamped() -> None:
    values = torch.tensor([[1e9, -1e9, 1.0, 0, 0, 0, 0, 0]])
    assert to_bytes(values).view(torch.float16)[:3].tolist() == [65504.0, -65504.0, 1.0]


def test_sketches_of_another_size_or_not_finite_are_refused() -> None:
    good = torch.zeros(32, dtype=torch.uint8)
    bad = torch.full((16,), float("nan"), dtype=torch.float16).view(torch.uint8)
    with pytest.raises(ValueError, match="expected"):
        quantization_steps(good, good[:-2], 2, 1.0)
    with pytest.raises(ValueError, match="not finite"):
        quantization_steps(good, bad, 2, 1.0)
