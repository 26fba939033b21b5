from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from gossamer.optim.fragments import Countdown, Fragment, Piece, add, gather, scatter, split


def llama(num_blocks: int, width: int = 64) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (256, width)}
    for block in range(num_blocks):
        shapes[f"model.layers.{block}.input_layernorm.weight"] = (width,)
        shapes[f"model.layers.{block}.self_attn.q_proj.weight"] = (width, width)
    shapes["model.norm.weight"] = (width,)
    return shapes


LARGE = 1 << 30


def names(fragment: Fragment) -> list[str]:
    return [piece.name for piece in fragment.pieces]


def test_blocks_are_strided_and_the_rest_comes_last() -> None:
    fragments = split(llama(7), LARGE, blocks_per_fragment=3)
    assert [fragment.id for fragment in fragments] == [0, 1, 2, 3]
    blocks = [sorted({name.split(".")[2] for name in names(fragment)}) for fragment in fragments[:-1]]
    assert blocks == [["0", "3", "6"], ["1", "4"], ["2", "5"]]
    assert names(fragments[-1]) == ["model.embed_tokens.weight", "model.norm.weight"]


def test_every_value_is_in_exactly_one_fragment() -> None:
    shapes = llama(5)
    held = [name for fragment in split(shapes, LARGE, 2) for name in names(fragment)]
    assert sorted(held) == sorted(shapes)


def test_large_tensors_come_first() -> None:
    fragment = split(llama(1), LARGE, 3)[0]
    assert names(fragment) == ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"]
    assert fragment.num_coded == 64 * 64
    assert fragment.numel == 64 * 64 + 64


@pytest.mark.parametrize("name", ["transformer.h.3.attn.weight", "gpt_neox.layers.3.w", "encoder.block.3.w", "blocks.3.w", "layers.3.w"])
def test_block_names_of_other_architectures(name: str) -> None:
    fragments = split({"embed": (8, 8), name: (8, 8)}, LARGE, 1)
    assert [names(fragment) for fragment in fragments] == [[name], ["embed"]]


def test_encoder_and_decoder_blocks_of_one_number_are_two_blocks() -> None:
    fragments = split({"encoder.block.0.w": (8, 8), "decoder.block.0.w": (8, 8)}, LARGE, 1)
    assert [names(fragment) for fragment in fragments] == [["encoder.block.0.w"], ["decoder.block.0.w"]]


def test_a_model_without_blocks_is_one_fragment() -> None:
    assert [names(fragment) for fragment in split({"a": (3,), "b": (2, 2)}, LARGE, 3)] == [["a", "b"]]


@pytest.mark.parametrize(
    ("shapes", "max_values", "blocks"),
    [({}, 3, 3), ({"a": (0, 4)}, 3, 3), ({"a": (4,)}, 3, 0), ({"a": (4,)}, 0, 3), ({"a": (4,), "statistics/mean": (0,)}, 3, 3)],
)
def test_impossible_splits_are_refused(shapes: dict[str, tuple[int, ...]], max_values: int, blocks: int) -> None:
    with pytest.raises(ValueError, match=r"\.$"):
        split(shapes, max_values, blocks)


def test_a_model_that_fits_is_one_fragment() -> None:
    whole = split(llama(7), sum(math.prod(shape) for shape in llama(7).values()))
    assert [fragment.name for fragment in whole] == ["all"]
    assert sorted(names(whole[0])) == sorted(llama(7))


def test_as_few_strided_fragments_as_fit() -> None:
    block = 64 * 64 + 64
    fragments = split(llama(7), 3 * block)
    assert [fragment.name for fragment in fragments] == [
        "blocks-0-3-6",
        "blocks-1-4",
        "blocks-2-5",
        "outside-blocks-part-0",
        "outside-blocks-part-1",
    ]


@pytest.mark.parametrize("max_values", [1, 100, 1000, 4160, 5000, 10_000])
@pytest.mark.parametrize("blocks", [None, 1, 3])
def test_no_fragment_is_larger_than_is_wanted_but_for_a_single_row(max_values: int, blocks: int | None) -> None:
    shapes = llama(5)
    fragments = split(shapes, max_values, blocks)
    assert [fragment.id for fragment in fragments] == list(range(len(fragments)))
    for fragment in fragments:
        rows = [math.prod(shapes[name][1:]) for name in names(fragment)]
        assert fragment.numel <= max_values or (len(rows) == 1 and fragment.numel == rows[0])
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for fragment in fragments:
        add(fragment, gather(fragment, tensors), copies)  # every value once
    assert all(torch.equal(tensors[name], copies[name]) for name in shapes)


def test_the_parts_of_a_group_are_of_about_one_size() -> None:
    sizes = [fragment.numel for fragment in split({"embedding": (1000, 64)}, 20_000)]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 4 * 64


def test_gather_then_scatter_gives_the_tensors_back() -> None:
    shapes = llama(2)
    tensors = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    tensors["model.embed_tokens.weight"] = torch.nn.Parameter(torch.randn(64, 256).t())
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for fragment in split(shapes, LARGE, 1):
        flat = gather(fragment, tensors)
        assert flat.dtype == torch.float32
        assert not flat.requires_grad
        scatter(fragment, flat, copies)
    assert all(torch.equal(tensors[name], copies[name]) for name in shapes)


@pytest.mark.parametrize(("write", "expected"), [(scatter, [[0, 1], [2, 3]]), (add, [[1, 2], [3, 4]])])
def test_parameters_are_written_in_place(write: Callable[..., None], expected: list[list[int]]) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    write(Fragment(0, "only", (Piece("w", 4),), 0), torch.arange(4.0), {"w": parameter})
    assert parameter.tolist() == expected
    assert parameter.grad_fn is None


def test_wrong_sizes_are_refused() -> None:
    fragment = Fragment(0, "only", (Piece("w", 4),), 0)
    with pytest.raises(ValueError, match="expects 4"):
        gather(fragment, {"w": torch.zeros(5)})
    with pytest.raises(ValueError, match="4 values"):
        scatter(fragment, torch.zeros(5), {"w": torch.zeros(4)})
    with pytest.raises(ValueError, match="4 values"):
        add(fragment, torch.zeros(5), {"w": torch.zeros(4)})


def run(countdown: Countdown, steps: int) -> list[tuple[int, int]]:
    due = []
    for step in range(steps):
        for fragment in countdown.tick():
            due.append((step, fragment))
            countdown.reset(fragment)
    return due


@pytest.mark.parametrize("inner_steps", [1, 2, 5, 25])
def test_periods_have_the_right_mean_and_bounds(inner_steps: int) -> None:
    due = run(Countdown(1, inner_steps, seed=3), 4000 * inner_steps)
    steps = [step for step, _ in due]
    periods = [after - before for before, after in pairwise(steps)]
    assert min(periods) >= 0.5 * inner_steps
    assert max(periods) <= 1.5 * inner_steps
    assert sum(periods) / len(periods) == pytest.approx(inner_steps, rel=0.02)
    if inner_steps == 25:
        assert set(periods) == set(range(13, 38))


def test_first_meetings_are_spread_over_one_period() -> None:
    first = [[Countdown(4, 100, seed=seed).state()["remaining"][fragment] for seed in range(400)] for fragment in range(4)]
    means = [sum(steps) / len(steps) for steps in first]
    assert means == pytest.approx([25, 50, 75, 100], rel=0.05)
    assert all(0.5 * mean * 0.9 <= min(steps) and max(steps) <= 1.5 * mean * 1.1 for steps, mean in zip(first, means, strict=True))


def test_countdowns_are_deterministic_and_differ_by_seed() -> None:
    assert run(Countdown(3, 10, seed=1), 500) == run(Countdown(3, 10, seed=1), 500)
    assert run(Countdown(3, 10, seed=1), 500) != run(Countdown(3, 10, seed=2), 500)


def test_a_due_fragment_is_named_once_and_rests_until_reset() -> None:
    countdown = Countdown(1, 4, seed=0)
    named = [fragment for _ in range(50) for fragment in countdown.tick()]
    assert named == [0]
    assert countdown.due() == [0]
    countdown.reset(0)
    assert countdown.due() == []


def test_steps_that_were_made_already_count() -> None:
    one, other = Countdown(1, 20, seed=0), Countdown(1, 20, seed=0)
    one.reset(0)
    other.reset(0, 6)
    assert other.state()["remaining"][0] == one.state()["remaining"][0] - 6
    other.reset(0, 1000)
    assert other.state()["remaining"] == [1], "it is due at the next step"


def test_another_interval_applies_at_once_and_cuts_running_countdowns() -> None:
    countdown = Countdown(2, 100, seed=0)
    countdown.pace(4)
    assert max(countdown.state()["remaining"]) <= 6
    countdown.reset(0)
    assert countdown.state()["remaining"][0] in range(2, 7)


def test_a_restored_countdown_continues_exactly() -> None:
    original = Countdown(3, 7, seed=9)
    run(original, 41)
    copy = Countdown(3, 7, seed=9)
    copy.restore(json.loads(json.dumps(original.state())))
    assert run(copy, 300) == run(original, 300)


def test_foreign_state_is_refused() -> None:
    with pytest.raises(ValueError, match="over 2 fragments"):
        Countdown(2, 5, seed=0).restore(Countdown(3, 5, seed=0).state())
