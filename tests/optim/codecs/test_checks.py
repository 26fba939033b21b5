from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gossamer.optim.codecs.checks import correct_wrapped, sent_bits, sum_differences, sums, weights

CPU = torch.device("cpu")
BITS = [8, 6, 4, 3]


def sides(true: Tensor, bits: int, seed: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What both sides end with, (differences, failed), when the true differences are int32[rows, 1024]."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randint(-(2**21), 2**21, true.shape, generator=generator, dtype=torch.int32)
    integers = own, own + true
    row_sums = []
    for side in integers:
        out = torch.empty(len(true), dtype=torch.int32)
        sums(side, torch.empty_like(side), out)
        row_sums.append(out)
    results = []
    for me in (0, 1):
        half = 2 ** (bits - 1)
        seen = ((integers[1 - me] - integers[me] + half) % 2**bits - half).float()
        moved = sum_differences(seen, row_sums[me], sent_bits(row_sums[1 - me], bits), bits)
        suspect = (moved != 0) | (seen == -half).any(1)
        rows = seen[suspect]
        good = correct_wrapped(rows, moved[suspect], bits)
        seen[suspect] = torch.where(good[:, None], rows, 0.0)
        results.append((seen, suspect.masked_scatter(suspect, ~good)))
    return results[0], results[1]


def assert_mirrored(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(one[0], -two[0])
    assert torch.equal(one[1], two[1])
    assert not one[0][one[1]].any()


def small(rows: int, bits: int, seed: int = 0) -> Tensor:
    """Differences well within the window."""
    generator = torch.Generator().manual_seed(seed)
    edge = max(1, 2 ** (bits - 1) // 4)
    return torch.randint(-edge, edge + 1, (rows, 1024), generator=generator, dtype=torch.int32)


def test_weights_are_odd_and_all_different_up_to_sign() -> None:
    whole = weights(CPU).long()
    assert len(set(whole.tolist()) | set((65536 - whole).tolist())) == 2048
    assert bool((whole % 2 == 1).all())
    assert whole[:4].tolist() == [32559, 8421, 27309, 4569]


@pytest.mark.parametrize("bits", BITS)
def test_a_model_that_fits_is_not_refused(bits: int) -> None:
    true = small(20, bits)
    one, two = sides(true, bits)
    assert_mirrored(one, two)
    assert torch.equal(one[0], true.float())
    assert not one[1].any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sign", [1, -1])
def test_one_value_outside_the_window_is_corrected(bits: int, sign: int) -> None:
    half = 2 ** (bits - 1)
    true = small(200, bits)
    generator = torch.Generator().manual_seed(1)
    columns = torch.randint(0, 1024, (200,), generator=generator)
    true[torch.arange(200), columns] = sign * torch.randint(half, half + half // 2 + 1, (200,), generator=generator, dtype=torch.int32)
    one, two = sides(true, bits)
    assert_mirrored(one, two)
    assert torch.equal(one[0], true.float())
    assert not one[1].any()


@pytest.mark.parametrize("bits", BITS)
def test_two_values_outside_the_window_are_always_detected(bits: int) -> None:
    half = 2 ** (bits - 1)
    true = small(500, bits)
    generator = torch.Generator().manual_seed(2)
    columns = torch.rand(500, 1024, generator=generator).argsort(1)[:, :2]
    sign = torch.randint(0, 2, (500, 2), generator=generator, dtype=torch.int32) * 2 - 1
    true.scatter_(1, columns, sign * (half + 1))
    one, two = sides(true, bits)
    assert_mirrored(one, two)
    assert one[1].all()


@pytest.mark.parametrize("bits", BITS)
def test_half_a_window_exactly_ends_with_opposite_signs_or_fails_on_both_sides(bits: int) -> None:
    half = 2 ** (bits - 1)
    true = small(4, bits)
    true[0, 5], true[1, 5] = half, -half
    true[2, 5], true[2, 9] = half, half
    true[3, 5], true[3, 9] = half, half + 1
    one, two = sides(true, bits)
    assert_mirrored(one, two)
    assert one[1].tolist() == [False, False, True, True]
    assert torch.equal(one[0][:2], true[:2].float())


@pytest.mark.parametrize("bits", BITS)
def test_unrelated_messages_fail(bits: int) -> None:
    generator = torch.Generator().manual_seed(3)
    true = torch.randint(-(2**18), 2**18, (6_000, 1024), generator=generator, dtype=torch.int32)
    one, two = sides(true, bits)
    assert_mirrored(one, two)
    assert int((~one[1]).sum()) <= 2
