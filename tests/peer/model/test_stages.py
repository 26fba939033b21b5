from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.optim.fragments import split
from gossamer.peer.model import computing
from gossamer.peer.model.computing import mask_documents, next_token_loss
from gossamer.peer.model.model import build_model, parameter_shapes, state_tensors
from gossamer.peer.model.stages import Cut, balanced_blocks, build_stage, need_stages, stage_of, stage_output, stage_shapes
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.sections import ModelSection
from tests.peer.small import LLAMA

ARCHITECTURES = ["llama", "qwen3", "olmo2"]
CUTS = [(1, 2), (1, 1, 1)]
SIZE = LLAMA | {"tie_word_embeddings": False, "num_hidden_layers": 3, "num_key_value_heads": 1}

torch.set_num_threads(1)


def section(architecture: str = "llama", **config: Any) -> ModelSection:
    return ModelSection(architecture=architecture, config=SIZE | config)


def some_tokens() -> Tensor:
    return torch.randint(0, 256, (3, 17), generator=torch.Generator().manual_seed(0))


def through_stages(stages: list[Any], tokens: Tensor) -> Tensor:
    """Train the stages on a micro-batch as holders do: each keeps only its input, and computes its output again to go backward."""
    inputs: list[Tensor | None] = [None]
    with torch.no_grad():
        for stage in stages[:-1]:
            inputs.append(stage_output(stage, tokens, inputs[-1]))
    hidden = inputs[-1]
    assert hidden is not None
    loss = next_token_loss(stages[-1], tokens, hidden=hidden.requires_grad_())
    loss.backward()  # type: ignore[no-untyped-call]
    for stage, own in zip(reversed(stages[:-1]), reversed(inputs[:-1]), strict=True):
        again = stage_output(stage, tokens, None if own is None else own.requires_grad_())
        assert hidden.grad is not None
        torch.autograd.backward(again, hidden.grad)
        hidden = own if own is not None else hidden
    return loss.detach()


def assembled(stages: list[Any], architecture: str) -> Any:
    """The whole model with the weights of its stages."""
    whole = build_model(section(architecture), 0)
    whole.load_state_dict({name: tensor for stage in stages for name, tensor in stage.state_dict().items()})
    return whole


@pytest.mark.parametrize("blocks", CUTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_the_whole_model(architecture: str, blocks: tuple[int, ...]) -> None:
    stages = [build_stage(section(architecture), Cut(blocks, number), seed=7) for number in range(len(blocks))]
    whole = assembled(stages, architecture)
    loss = next_token_loss(whole, some_tokens())
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(through_stages(stages, some_tokens()), loss.detach())
    gradients = {name: parameter.grad for stage in stages for name, parameter in stage.named_parameters()}
    assert set(gradients) == set(dict(whole.named_parameters()))
    for name, parameter in whole.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stages_share_out_the_whole_models_state_in_its_order(architecture: str) -> None:
    shapes = [stage_shapes(section(architecture), Cut((1, 1, 1), number)) for number in range(3)]
    whole = parameter_shapes(section(architecture))
    assert {name: shape for stage in shapes for name, shape in stage.items()} == whole
    assert sum(map(len, shapes)) == len(whole)
    for stage in shapes:
        assert list(stage) == [name for name in whole if name in stage]
        split(stage, 1 << 20, 1)


def test_a_stage_is_drawn_from_the_seed_and_its_number_alone() -> None:
    state = torch.get_rng_state()
    one, again, other = (build_stage(section(), Cut((1, 2), 1), seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, state_tensors(again)[name]) for name, tensor in state_tensors(one).items())
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    first = build_stage(section(), Cut((1, 2), 0), 3)
    up, down = first.model.layers[0].mlp.up_proj.weight, one.model.layers[1].mlp.up_proj.weight
    assert not torch.equal(up, down)
    expected = build_model(section(), 3)
    assert float(up.detach().std()) == pytest.approx(float(expected.model.layers[0].mlp.up_proj.weight.detach().std()), rel=0.05)
    assert torch.equal(one.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)


def test_a_stage_of_a_whole_model_shares_its_weights() -> None:
    whole = build_model(section(), 0)
    stages = [stage_of(whole, Cut((2, 1), number)) for number in range(2)]
    through_stages(stages, some_tokens())
    through = {name: parameter.grad for name, parameter in whole.named_parameters()}
    alone = build_model(section(), 0)
    next_token_loss(alone, some_tokens()).backward()  # type: ignore[no-untyped-call]
    assert all(torch.equal(through[name], parameter.grad) for name, parameter in alone.named_parameters())  # type: ignore[arg-type]
    assert len(dict(whole.named_parameters())) == sum(len(dict(stage.named_parameters())) for stage in stages)


def test_documents_are_masked_in_each_stage() -> None:
    whole = build_model(section(), 0)
    mask_documents(whole, 5)
    tokens = some_tokens()
    tokens[:, 4] = 5
    stages = [stage_of(whole, Cut((1, 1, 1), number)) for number in range(3)]
    assert torch.equal(through_stages(stages, tokens), next_token_loss(whole, tokens).detach())


def test_a_large_head_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build_model(section(), 0)
    stages = [stage_of(whole, Cut((2, 1), number)) for number in range(2)]
    expected = next_token_loss(whole, some_tokens())
    monkeypatch.setattr(computing, "MAX_LOGITS", 4096)
    torch.testing.assert_close(through_stages(stages, some_tokens()), expected.detach())


@pytest.mark.parametrize(
    ("config", "num_stages", "expected"),
    [
        ({"num_hidden_layers": 8}, 2, (4, 4)),
        ({"num_hidden_layers": 8, "vocab_size": 4096}, 2, (7, 1)),  # the head is as heavy as eight blocks
        ({"num_hidden_layers": 16}, 2, (7, 9)),  # the last stage computes its blocks once less
        ({"num_hidden_layers": 3}, 3, (1, 1, 1)),
        ({"num_hidden_layers": 3}, 1, (3,)),
    ],
)
def test_stages_are_balanced_by_what_they_compute(config: dict[str, Any], num_stages: int, expected: tuple[int, ...]) -> None:
    assert balanced_blocks(section(**config), num_stages) == expected


def test_the_slowest_stage_is_the_fastest_possible() -> None:
    made = section(num_hidden_layers=9)
    block, head = 64 * (2 * 64 + 2 * 32 + 3 * 96) + 2 * 64, 256 * 64 + 64

    def slowest(blocks: tuple[int, ...]) -> int:
        return max(*(8 * block * number for number in blocks[:-1]), 6 * (block * blocks[-1] + head))

    every = [(a, b - a, c - b, 9 - c) for a, b, c in combinations(range(1, 9), 3)]
    assert slowest(balanced_blocks(made, 4)) == min(map(slowest, every))


@pytest.mark.parametrize(
    ("architecture", "config", "num_stages", "words", "hint"),
    [
        ("llama", SIZE | {"tie_word_embeddings": True}, 2, "embedding and head are one tensor", "tie_word_embeddings = false"),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 2, "tie_word_embeddings": False}, 2, "no plan to cut gpt2", "count = 1"),
        ("granite", SIZE | {"embedding_multiplier": 2.0}, 2, "granite changes the hidden states", "count = 1"),
        ("mixtral", SIZE | {"num_local_experts": 2, "output_router_logits": True}, 2, "auxiliary loss", "output_router_logits = false"),
        ("llama", SIZE, 4, "4 stages need a block each, and the model has 3", "count to 3 or less"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(architecture: str, config: dict[str, Any], num_stages: int, words: str, hint: str) -> None:
    with pytest.raises(BadManifest, match=words) as caught:
        need_stages(ModelSection(architecture=architecture, config=config), num_stages)
    assert hint in caught.value.hint


def test_blocks_that_are_not_the_models_are_refused() -> None:
    with pytest.raises(BadManifest, match="sum to 4, and the model has 3"):
        build_stage(section(), Cut((2, 2), 0), 0)
    for wrong in (((1, 2), 2), ((0, 3), 0)):
        with pytest.raises(ValueError, match="There is no stage"):
            Cut(*wrong)
