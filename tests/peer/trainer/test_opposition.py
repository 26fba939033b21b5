"""Sources of micro-batches, and which of them all others oppose."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gossamer.peer.trainer import opposition
from gossamer.peer.trainer.opposition import IN_A_ROW, LEARNED, RECENT, SAMPLED, GradientSample, Opposition

NOISE = 2.0  # of one micro-batch, in lengths of the mean


def directions(num: int) -> list[Tensor]:
    """Unit vectors, each at a right angle to the others."""
    return list(torch.eye(num, 1000))


def play(sources: dict[str, Tensor], num_rounds: int, found: Opposition | None = None) -> dict[str, int]:
    """Let each source send a micro-batch a round, noise around its mean gradient; return in which round each one was opposed first."""
    found, draws, opposed = found or Opposition(), torch.Generator().manual_seed(0), dict[str, int]()
    for number in range(1, num_rounds + 1):
        for source, mean in sources.items():
            noise = torch.randn(mean.shape, generator=draws) * (NOISE / math.sqrt(len(mean)))
            if found.note(source, mean + noise):
                opposed.setdefault(source, number)
    return opposed


def test_a_source_that_all_others_oppose_is_found_soon_and_no_other_one() -> None:
    right, other = directions(2)
    opposed = play({"a": right, "b": right + 0.5 * other, "c": right - 0.5 * other, "wrong": -2 * right}, 100)
    assert set(opposed) == {"wrong"} and LEARNED + IN_A_ROW - 1 <= opposed["wrong"] <= 30


def test_it_begins_anew_once_it_was_found() -> None:
    right, _ = directions(2)
    found = Opposition()
    assert play({"a": right, "b": right, "wrong": -right}, 40, found)
    assert not play({"a": right, "b": right, "wrong": right}, 100, found)


@pytest.mark.parametrize("num", [2, 3, 5, 8])
def test_unlike_texts_oppose_nobody(num: int) -> None:
    """At the end of training the gradients of all texts add up to nothing, so each one points against the sum of the others."""
    apart = directions(num)
    assert not play({str(number): one for number, one in enumerate(apart)}, 60)
    middle = torch.stack(apart).mean(0)
    assert not play({str(number): one - middle for number, one in enumerate(apart)}, 60)


def test_without_a_majority_nobody_is_blamed() -> None:
    right, _ = directions(2)
    assert not play({"a": right, "wrong": -right}, 60)
    assert not play({"a": right, "b": right, "wrong": -right, "also wrong": -right}, 60)


def test_values_that_are_not_finite_neither_count_nor_stay() -> None:
    right, _ = directions(2)
    found = Opposition()
    for value in (math.nan, math.inf):
        assert not found.note("wrong", torch.full_like(right, value))
    assert set(play({"a": right, "b": right, "wrong": -right}, 60, found)) == {"wrong"}


def test_a_source_that_has_sent_nothing_for_long_opposes_nobody() -> None:
    right, _ = directions(2)
    found = Opposition()
    play({"a": right, "b": right}, LEARNED, found)
    play({"wrong": -right}, LEARNED + IN_A_ROW - 2, found)
    for _ in range(RECENT):
        found.note("c", right)
    assert not play({"c": right, "wrong": -right}, 20, found)


def test_as_many_sources_are_kept_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opposition, "SOURCES_KEPT", 3)
    right, _ = directions(2)
    found = Opposition()
    for number in range(10):
        found.note(str(number), right)
    assert list(found._pulls) == ["7", "8", "9"]


def test_the_sample_has_the_same_entries_each_time_from_all_parameters_that_train() -> None:
    small, large, frozen = torch.zeros(3, 5), torch.zeros(300, 500), torch.zeros(10)
    for tensor in (small, large):
        tensor.requires_grad_()
    sample = GradientSample([small, frozen, large])
    assert torch.equal(sample.read(), torch.zeros(SAMPLED))
    large.grad = torch.arange(large.numel(), dtype=torch.float32).view(large.shape)
    first = sample.read()
    assert first.max() < large.numel() and len(first.unique()) > 0.9 * SAMPLED
    large.grad += 1.0
    small.grad = torch.ones_like(small)
    assert torch.equal(sample.read(), first + 1.0)
