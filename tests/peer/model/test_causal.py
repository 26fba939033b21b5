"""Architectures of transformers at a tiny size: those that see later tokens are refused, all others are accepted."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from transformers import AutoConfig

from gossamer.peer.model.model import build_model
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.sections import ModelSection

SIZES: dict[str, Any] = {  # each architecture takes those that it has
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 64, "d_model": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
    "encoder_ffn_dim": 64, "ffn_dim": 64, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4,
    "moe_intermediate_size": 16, "embedding_size": 32, "word_embed_proj_dim": 32, "pad_token_id": 0,
}  # fmt: skip
CAUSAL = (
    "gpt2",
    "opt",
    "bart",
    "falcon",
    "gemma",
    "mistral",
    "mixtral",
    "qwen3_moe",
    "qwen3_next",
    "recurrent_gemma",
    "exaone_moe",
    "lfm2",
)
ENCODERS = ("bert", "bert-generation", "camembert", "electra", "roberta", "roc_bert", "xlm-roberta-xl")


def section(architecture: str) -> ModelSection:
    config_class = type(AutoConfig.for_model(architecture))
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    return ModelSection(architecture=architecture, config={name: size for name, size in SIZES.items() if name in known})


@pytest.mark.parametrize("architecture", CAUSAL)
def test_a_causal_architecture_is_accepted(architecture: str) -> None:
    build_model(section(architecture), 0)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_an_encoder_is_refused(architecture: str) -> None:
    with pytest.raises(BadManifest, match=f"the predictions of {architecture} see the tokens"):
        build_model(section(architecture), 0)
