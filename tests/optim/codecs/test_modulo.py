from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gossamer.optim.codecs import Gap, checks, codec
from gossamer.optim.codecs.hadamard import hadamard_matrix, sign_pool, window
from gossamer.optim.codecs.modulo import Modulo
from tests.optim.codecs.test_interface import exchange

pytestmark = pytest.mark.usefixtures("coding")

NAMES = ["modulo8", "modulo6", "modulo4", "modulo3"]


def modulo(name: str) -> Modulo:
    known = codec(name)
    assert isinstance(known, Modulo)
    return known


def near_pair(num_values: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first = 0.02 * torch.randn(num_values, generator=generator)
    return first, first + spread * torch.randn(num_values, generator=generator)


def noise(gap: Gap, true: Tensor) -> float:
    kept = ~gap.failed.repeat_interleave(1024)[: len(true)]
    return float((gap.values - true)[kept].square().sum() / true[kept].square().sum())


def test_a_programs_default_device_is_not_that_of_the_codec() -> None:
    first, second = near_pair(4096, 1e-3)
    for cached in (hadamard_matrix, checks._columns, checks._digits):
        cached.cache_clear()
    with torch.device("meta"):
        gap = exchange(codec("modulo4"), first, second)[0]
    assert noise(gap, second - first) < 0.1 and not gap.failed.any()


@pytest.mark.parametrize(("name", "bits"), [("modulo8", 8), ("modulo6", 6), ("modulo4", 4), ("modulo3", 3)])
def test_bits_on_the_wire(name: str, bits: int) -> None:
    coder = modulo(name)
    total = coder.sketch_bytes(1024 * 100) + coder.payload_bytes(1024 * 100)
    assert total * 8 / 102_400 == bits + (8 * 16 + 16) / 1024


def test_the_four_bit_codec_stays_below_4_2_bits() -> None:
    coder = modulo("modulo4")
    assert (coder.sketch_bytes(10**6) + coder.payload_bytes(10**6)) * 8 / 10**6 < 4.15


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spread", [1e-3, 3e-2])
def test_noise_is_that_of_a_dithered_step_at_any_distance(name: str, spread: float) -> None:
    coder = modulo(name)
    first, second = near_pair(1024 * 500, spread)
    gap, _ = exchange(coder, first, second)
    step = 2 * coder.kappa / 2**coder.bits
    assert noise(gap, second - first) == pytest.approx(step**2 / 6, rel=0.1)


@pytest.mark.parametrize(("name", "most"), [("modulo8", 0.0), ("modulo6", 0.0), ("modulo4", 0.004), ("modulo3", 0.05)])
def test_few_blocks_fail_on_a_gaussian_gap(name: str, most: float) -> None:
    gap, _ = exchange(modulo(name), *near_pair(1024 * 2000, 2e-3))
    assert float(gap.failed.float().mean()) <= most


@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_within_the_noise_of_its_block(name: str) -> None:
    coder = modulo(name)
    first, second = near_pair(1024 * 300, 2e-3)
    gap, _ = exchange(coder, first, second)
    error = (gap.values - (second - first)).view(-1, 1024)[~gap.failed]
    spread = 2e-3 * 2 * coder.kappa / 2**coder.bits / math.sqrt(6)
    assert float(error.abs().max()) < 8 * spread


def test_the_gap_is_unbiased_over_seeds() -> None:
    first, second = near_pair(1024, 2e-3)
    gaps = [exchange(modulo("modulo4"), first, second, seed)[0] for seed in range(400)]
    kept = torch.stack([gap.values for gap in gaps if not gap.failed.any()])
    error = kept.mean(0) - (second - first)
    one_sigma = 2e-3 * math.sqrt(0.079 / len(kept))
    assert float(error.square().mean().sqrt()) == pytest.approx(one_sigma, rel=0.15)


def test_structure_in_the_weights_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    for first in (torch.full((8192,), 0.5), torch.linspace(-1, 1, 8192), torch.zeros(8192)):
        second = first.clone()
        second[::100] += 0.01 * torch.randn(82, generator=generator)
        gap, _ = exchange(modulo("modulo6"), first, second)
        assert noise(gap, second - first) < 0.02
        assert not gap.failed.any()


def test_neighbours_with_other_gaps_get_other_windows() -> None:
    first, second = near_pair(1024 * 400, 1.0)
    scale = torch.logspace(-4, -2, 400).repeat_interleave(1024)
    second = first + (second - first) * scale
    gap, _ = exchange(modulo("modulo4"), first, second)
    assert float(gap.failed.float().mean()) < 0.02
    smallest = slice(0, 1024 * 40)
    error = (gap.values - (second - first))[smallest]
    assert float(error.square().sum() / (second - first)[smallest].square().sum()) < 0.15


def test_blocks_without_a_gap_among_others_decode_finely() -> None:
    first, second = near_pair(1024 * 100, 2e-3)
    second[: 1024 * 50] = first[: 1024 * 50]
    gap, _ = exchange(modulo("modulo4"), first, second)
    assert float(gap.values[: 1024 * 40].abs().max()) < 1e-4


def test_partners_too_far_apart_are_detected() -> None:
    """Both sketches lie: the window is far too narrow for what was really sent."""
    coder = modulo("modulo4")
    first, second = near_pair(1024 * 500, 0.02)
    sketch = coder.sketch(first, 1)
    one, two = (coder.encode(u, 1, sketch, sketch) for u in (first, second))
    gap, mirrored = coder.gap(one, two.payload), coder.gap(two, one.payload)
    assert int((~gap.failed).sum()) <= 1
    assert torch.equal(gap.failed, mirrored.failed)


def test_a_flipped_code_is_detected_by_the_receiver() -> None:
    coder = modulo("modulo4")
    first, second = near_pair(1024 * 20, 2e-3)
    sketches = coder.sketch(first, 1), coder.sketch(second, 1)
    one = coder.encode(first, 1, *sketches)
    payload = coder.encode(second, 1, *sketches[::-1]).payload.clone()
    payload[512 * 3 + 100] ^= 0x21
    assert coder.gap(one, payload).failed.nonzero().view(-1).tolist() == [3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_sketch_that_is_not_finite_is_refused(bad: float) -> None:
    coder = modulo("modulo4")
    first, _ = near_pair(5000, 1e-3)
    own = coder.sketch(first, 1)
    hostile = own.view(torch.float16).clone()
    hostile[11] = bad
    with pytest.raises(ValueError, match="not finite"):
        coder.encode(first, 1, own, hostile.view(torch.uint8))
    with pytest.raises(ValueError, match="expected"):
        coder.encode(first, 1, own, own[:-2])


def test_a_huge_sketch_widens_only_its_neighbourhood() -> None:
    coder = modulo("modulo4")
    first, second = near_pair(1024 * 40, 1e-3)
    sketches = coder.sketch(first, 1), coder.sketch(second, 1)
    hostile = sketches[1].view(torch.float16).clone()
    hostile[:8] = 65504.0
    gap = coder.gap(coder.encode(first, 1, sketches[0], hostile.view(torch.uint8)), coder.encode(second, 1, *sketches[::-1]).payload)
    assert bool(torch.isfinite(gap.values).all())
    assert noise(Gap(gap.values[1024 * 6 :], gap.failed[6:]), (second - first)[1024 * 6 :]) < 0.1


def test_the_last_block_may_be_short() -> None:
    for size in (1, 1023, 1025, 262_144 + 1, 300_000):
        first, second = near_pair(size, 1e-3, seed=size)
        gap, mirrored = exchange(modulo("modulo8"), first, second)
        assert torch.equal(gap.values, -mirrored.values)
        assert float((gap.values - (second - first)).abs().max()) < 1e-3 if size > 1 else True


def test_another_codecs_encoding_is_refused() -> None:
    plain = codec("fp32")
    u = torch.randn(1024)
    with pytest.raises(TypeError, match="own encode"):
        modulo("modulo4").gap(plain.encode(u, 1, u[:0], u[:0]), torch.zeros(514, dtype=torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_the_gap_has_the_same_bits_however_it_is_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything up to one last product is exact, so slabs, threads and devices cannot differ."""
    coder = modulo(name)
    first, second = near_pair(1024 * 40, 2e-3)
    sketches = coder.sketch(first, 1), coder.sketch(second, 1)
    one, two = coder.encode(first, 1, *sketches), coder.encode(second, 1, *sketches[::-1])
    gap = coder.gap(one, two.payload)
    monkeypatch.setattr("gossamer.optim.codecs.modulo.CPU_SLAB_BLOCKS", 3)
    assert torch.equal(coder.gap(one, two.payload).values, gap.values)
    # Undone by hand in float64: signs, then the exact transform, must give whole multiples of the step.
    signs = window(sign_pool(1, 40, torch.device("cpu")), slice(0, 40)).double()
    side = hadamard_matrix(torch.device("cpu")).double()
    rows = (gap.values.view(40, 1024).double() * signs / (one.steps / 32)[:, None].double()).view(40, 32, 32)
    whole = (side @ rows @ side).view(40, 1024)[~gap.failed] / 1024
    assert float((whole - whole.round()).abs().max()) < 1e-3 * 2**coder.bits
    again = (side @ whole.round().view(-1, 32, 32) @ side).view(-1, 1024).float() * (one.steps / 32)[~gap.failed, None]
    assert torch.equal(again * signs.float()[~gap.failed], gap.values.view(40, 1024)[~gap.failed])


def test_the_wire_does_not_change_between_releases() -> None:
    coder = modulo("modulo4")
    first = (torch.arange(1024) * 37 % 101 - 50).float() / 4096  # exact in every sum, so no machine rounds otherwise
    second = first + (torch.arange(1024) * 11 % 7 - 3).float() / 65536
    sketches = coder.sketch(first, 1), coder.sketch(second, 1)
    payload = coder.encode(first, 1, *sketches).payload
    assert payload.sum().item() == 65806
    assert payload[-2:].tolist() == [239, 13]
