from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gossamer.peer.model import computing
from gossamer.peer.model.activation_memory import activation_bytes
from gossamer.peer.model.computing import (
    blocks,
    compile_blocks,
    document_positions,
    has_plain_head,
    loss_in_parts,
    mask_documents,
    next_token_loss,
    predictions,
    recompute_blocks,
)
from gossamer.peer.model.model import build_model, parameter_shapes
from gossamer.peer.model.throughput import flops_per_token, peak_flops
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.sections import ModelSection
from tests.peer.small import LLAMA

SMALL = ModelSection(config=LLAMA)
GRANITE = ModelSection(architecture="granite", config=LLAMA | {"logits_scaling": 2.0})  # its logits are divided after the head


def tokens(num_sequences: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (num_sequences, 17), generator=torch.Generator().manual_seed(0))


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, while it compiles
def test_what_is_measured_beside_the_training_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling for another shape takes seconds, at a step boundary."""
    model, compiled = build_model(SMALL, 0), list[torch.fx.GraphModule]()
    expected = predictions(model, tokens(1))

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    compile_one = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, dynamic: compile_one(block, backend=backend, dynamic=dynamic))
    compile_blocks(model)
    next_token_loss(model, tokens()).backward()
    num_compiled = len(compiled)
    assert num_compiled
    torch.testing.assert_close(predictions(model, tokens(1)), expected)
    next_token_loss(model, tokens()).backward()
    assert len(compiled) == num_compiled


def test_a_head_in_parts_gives_the_same_loss_and_gradient() -> None:
    model = build_model(SMALL, 0)
    whole = next_token_loss(model, tokens())
    parts = loss_in_parts(model, tokens(), 5)
    torch.testing.assert_close(parts, whole)
    for one, other in zip(gradients(model, parts), gradients(model, whole), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_only_a_plain_head_is_computed_in_parts() -> None:
    assert has_plain_head(build_model(SMALL, 0))
    assert not has_plain_head(build_model(GRANITE, 0))
    assert not has_plain_head(torch.nn.Linear(2, 2))


def test_bf16_is_near_fp32_and_leaves_the_weights() -> None:
    model = build_model(SMALL, 0)
    loss = next_token_loss(model, tokens(), torch.bfloat16)
    assert abs(float(loss.detach()) - float(next_token_loss(model, tokens()).detach())) < 0.01
    assert {gradient.dtype for gradient in gradients(model, loss)} == {torch.float32}


def test_activations_computed_again_give_the_same_gradient() -> None:
    model = build_model(SMALL, 0)
    kept = gradients(model, next_token_loss(model, tokens()))
    assert recompute_blocks(model)
    for one, other in zip(gradients(model, next_token_loss(model, tokens())), kept, strict=True):
        torch.testing.assert_close(one, other)
    assert not recompute_blocks(torch.nn.Linear(2, 2))


def test_fewer_sequences_and_recomputed_activations_take_less() -> None:
    whole, half = activation_bytes(SMALL, 4, 32), activation_bytes(SMALL, 2, 32)
    assert 1.9 * half < whole < 2.1 * half
    assert activation_bytes(SMALL, 4, 32, recompute=True) < 0.8 * whole


def test_a_head_in_parts_is_counted_so() -> None:
    large = ModelSection(config={**LLAMA, "vocab_size": 1 << 18, "max_position_embeddings": 1024})
    assert 3 * 4 * computing.MAX_LOGITS < activation_bytes(large, 4, 1024) < 4 * 4 * computing.MAX_LOGITS


def test_the_blocks_are_found() -> None:
    model = build_model(SMALL, 0)
    assert blocks(model) == list(model.model.layers)


def test_operations_are_those_that_torch_counts() -> None:
    model = build_model(SMALL, 0)
    with FlopCounterMode(display=False) as counter:
        next_token_loss(model, tokens()).backward()  # type: ignore[no-untyped-call]
    counted = counter.get_total_flops() / (3 * 16)
    assert 0.85 < counted / flops_per_token(model.config, parameter_shapes(SMALL), 16) < 1.01  # torch leaves attention out on some devices


def test_an_unknown_peak_rate_is_zero() -> None:
    assert peak_flops(torch.device("cpu"), torch.float32) == 0


def test_masked_documents_do_not_see_each_other() -> None:
    """What is predicted behind the end of a document is what is predicted of the next one alone."""
    assert document_positions(torch.tensor([[5, 5, 0, 5, 5, 0]]), 0).tolist() == [[0, 1, 0, 1, 2, 0]]
    model, window = build_model(SMALL, 0), tokens(1)
    window[0, 6] = 0
    plain = model(input_ids=window, use_cache=False).logits[0, 7:]
    mask_documents(model, 0)
    masked = model(input_ids=window, use_cache=False).logits[0, 7:]
    alone = model(input_ids=window[:, 6:], use_cache=False).logits[0, 1:]
    torch.testing.assert_close(masked, alone)
    assert not torch.allclose(masked, plain)
    whole = next_token_loss(model, window)
    torch.testing.assert_close(loss_in_parts(model, window, 2), whole)


@pytest.mark.parametrize("document_end", [0, 1])
def test_documents_in_a_vocabulary_of_two_are_masked(document_end: int) -> None:
    mask_documents(build_model(ModelSection(config=SMALL.config | {"vocab_size": 2}), 0), document_end)


def test_an_architecture_that_cannot_mask_documents_is_refused() -> None:
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 256,
        "ffn_dim": 32,
        "word_embed_proj_dim": 16,
    }
    with pytest.raises(BadManifest, match="does not mask"):
        mask_documents(build_model(ModelSection(architecture="opt", config=size), 0), 0)
