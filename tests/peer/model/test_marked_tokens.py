"""A model on marked tokens: only targets have a loss and a gradient, and documents that share a sequence do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gossamer.peer.model import computing
from gossamer.peer.model.computing import mask_marked_documents, next_token_loss, predictions, token_losses
from gossamer.peer.model.model import build_model
from gossamer.peer.text.labels import marked, num_targets
from gossamer.peer.text.packing import PackedSequences
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.sections import ModelSection
from tests.peer.fine_tuned import LLAMA

WIDTH, PADDING = 24, 255
DOCUMENT = st.lists(st.tuples(st.integers(0, 250), st.booleans()), min_size=2, max_size=9).filter(lambda each: any(t for _, t in each[1:]))
DOCUMENTS = st.lists(DOCUMENT, min_size=1, max_size=5)
Documents = list[list[tuple[int, bool]]]


@cache
def model_that(shares: bool) -> PreTrainedModel:
    """A small llama, for documents that share a sequence or have their own."""
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, attn_implementation="sdpa")).eval()
    model.load_state_dict(build_model(ModelSection(architecture="llama", config=LLAMA), 3).state_dict())
    if shares:
        mask_marked_documents(model)
    return model


def gradient(model: PreTrainedModel, loss: Callable[[], Tensor]) -> Tensor:
    model.zero_grad()
    loss().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def packed(documents: Documents, *, shares: bool, padding: int = PADDING) -> Tensor:
    marks = [marked(np.array([token for token, _ in each]), np.array([trains for _, trains in each])) for each in documents]
    sequences = PackedSequences(np.concatenate(marks), WIDTH, padding, shares=shares)
    return torch.from_numpy(sequences.sequences(np.arange(len(sequences))))


def alone(model: PreTrainedModel, documents: Documents) -> Tensor:
    """The mean loss of the targets, each document in a sequence of its own, computed here."""
    losses = []
    for document in documents:
        tokens = torch.tensor([[token for token, _ in document]])
        logits = model(input_ids=tokens).logits[0, :-1]
        losses += [functional.cross_entropy(logits[at - 1], tokens[0, at]) for at in range(1, len(document)) if document[at][1]]
    return torch.stack(losses).mean()


@settings(max_examples=25)
@given(DOCUMENTS, st.booleans())
def test_loss_and_gradient_are_those_of_the_targets_in_documents_of_their_own(documents: Documents, shares: bool) -> None:
    rows, plain = packed(documents, shares=shares), model_that(False)
    model = model_that(shares)
    expected = alone(plain, documents)
    assert next_token_loss(model, rows).item() == pytest.approx(expected.item(), rel=1e-4)
    found, wanted = gradient(model, lambda: next_token_loss(model, rows)), gradient(plain, lambda: alone(plain, documents))
    assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))


@settings(max_examples=10)
@given(DOCUMENTS, st.integers(0, 254))
def test_padding_has_no_part_in_the_gradient(documents: Documents, other: int) -> None:
    model = model_that(True)
    one, two = (packed(documents, shares=True, padding=padding) for padding in (PADDING, other))
    first, second = (gradient(model, lambda rows=rows: next_token_loss(model, rows)) for rows in (one, two))
    assert torch.allclose(first, second, rtol=1e-4, atol=1e-6 * float(first.abs().max()))


def test_losses_and_predictions_are_those_of_targets_alone() -> None:
    rows = packed([[(1, False), (2, True), (3, False)], [(4, False), (5, True), (6, True)]], shares=True)
    model = model_that(True)
    losses = token_losses(model, rows)
    assert losses.shape == (int(num_targets(rows)),) == (3,)
    assert losses.mean().item() == pytest.approx(next_token_loss(model, rows).item(), rel=1e-5)
    assert predictions(model, rows).shape == (3, LLAMA["vocab_size"])


def test_a_loss_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = packed([[(1, False), (2, True), (3, False)], [(4, False), (5, True), (6, True)]], shares=False)
    model = model_that(False)
    whole = gradient(model, lambda: next_token_loss(model, rows))
    monkeypatch.setattr(computing, "MAX_LOGITS", 5 * LLAMA["vocab_size"])
    assert torch.allclose(gradient(model, lambda: next_token_loss(model, rows)), whole, rtol=1e-3, atol=1e-6)


def test_a_model_that_cannot_mask_documents_is_refused() -> None:
    config = {
        "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 260,
        "max_position_embeddings": 32, "word_embed_proj_dim": 32,
    }  # fmt: skip
    model = build_model(ModelSection(architecture="opt", config=config), 0)
    with pytest.raises(BadManifest, match="does not mask documents") as caught:
        mask_marked_documents(model)
    assert "mask_documents = false" in caught.value.hint
