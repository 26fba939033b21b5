"""A run that goes on from a model in a folder: what its manifest pins, and who has these weights."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel, PreTrainedConfig, T5Config, ViTConfig

from gossamer.peer.model.model import build_model, parameter_shapes, state_tensors
from gossamer.peer.model.start import fine_tuned, initial_model, load_start, started_from
from gossamer.peer.model.weights import set_weights
from gossamer.peer.text.tokenizer import BYTES, byte_tokenizer, load_tokenizer
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.manifest import Manifest
from gossamer.protocol.run.sections import ModelSection, TokenizerSection
from tests.mutations import mutated_bytes, mutated_json
from tests.peer.small import LLAMA
from tests.processor_time import takes_at_most

# Its router has a buffer of floats that is part of its state.
ROUTED = {
    "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 256, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama with a tokenizer of its own, as transformers saves them."""
    made = tmp_path_factory.mktemp("model")
    build_model(ModelSection(config=LLAMA), 5).save_pretrained(made)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "the end"})
    tokenizer.save_pretrained(made)
    return made


def test_a_manifest_pins_model_tokenizer_and_weights(folder: Path) -> None:
    manifest = Manifest.from_toml(Manifest.checked(started_from(folder, 2000, 3e-3)).to_toml())
    assert (manifest.inner.learning_rate, manifest.inner.warmup_steps) == (1e-3, 20)
    model = load_start(manifest.model, folder, 0)
    expected = build_model(ModelSection(config=LLAMA), 5)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))
    tokenizer = load_tokenizer(manifest.tokenizer, None, folder)
    assert (tokenizer.name, tokenizer.document_end, tokenizer.digest) == (folder.name, 256, manifest.tokenizer.digest)


def test_other_weights_and_another_tokenizer_are_refused_with_both_digests(folder: Path, tmp_path: Path) -> None:
    manifest = Manifest.checked(started_from(folder, 2000, 3e-3))
    build_model(ModelSection(config=LLAMA), 6).save_pretrained(tmp_path)
    with pytest.raises(BadManifest, match=rf"differ from .* [0-9a-f]{{64}}, the manifest's {manifest.model.weights}"):
        load_start(manifest.model, tmp_path, 0)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(BadManifest, match=rf"its digest is [0-9a-f]{{64}}, not {manifest.tokenizer.digest}"):
        load_tokenizer(manifest.tokenizer, tmp_path)


def test_a_manifest_does_not_share_the_weights_of_a_folder_that_it_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for named in (str(folder), f"./{folder.name}", folder.name):
        section = ModelSection(hub=named, revision="0" * 40)
        with pytest.raises(BadManifest, match="is a folder of this machine"):
            initial_model(Manifest(model=section), None)


def test_a_folder_without_a_model_or_a_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadManifest, match="cannot be built"):
        started_from(tmp_path, 2000, 3e-3)
    build_model(ModelSection(config=LLAMA), 6).save_pretrained(tmp_path)
    with pytest.raises(BadManifest, match="holds no tokenizer"):
        started_from(tmp_path, 2000, 3e-3)
    byte_tokenizer().save_pretrained(tmp_path)
    assert started_from(tmp_path, 2000, 3e-3)["tokenizer"] == {"name": BYTES}
    with pytest.raises(BadManifest, match="give --model|cannot be loaded"):
        load_tokenizer(TokenizerSection(name=str(folder / "missing")))


def test_buffers_of_floats_are_part_of_the_trained_state() -> None:
    """They are averaged, checkpointed, cloned and exported like parameters; what the config decides is not."""
    section = ModelSection(architecture="deepseek_v3", config=ROUTED)
    model = build_model(section, 0)
    [buffer] = {*state_tensors(model)} - {name for name, _ in model.named_parameters()}
    assert buffer.endswith("e_score_correction_bias") and buffer in parameter_shapes(section)
    weights = {name: tensor.detach() + 1.0 for name, tensor in state_tensors(model).items()}
    set_weights(model, weights)
    assert torch.equal(state_tensors(model)[buffer], weights[buffer])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", {"num_hidden_layers": 10**9}),
        ("config.json", {"num_hidden_layers": 10**4}),
        ("config.json", {"vocab_size": 10**12}),
        ("config.json", {"hidden_size": 1 << 23, "head_dim": 16}),
        ("config.json", b'{"model_type":' + b"[" * 100_000),
        ("config.json", {"rms_norm_eps": math.nan}),
        ("config.json", {"own": {"a": {"b": {"c": {"d": {"e": 1}}}}}}),
        ("model.safetensors", (1 << 62).to_bytes(8, "little") + b"{}"),
        ("model.safetensors", b""),
        ("config.json", b"{}"),
    ],
    ids=["layers", "many layers", "words", "width", "nesting", "no number", "a deep key", "length of a header", "no weights", "none"],
)
def test_a_hostile_folder_is_refused_at_once(name: str, change: dict[str, Any] | bytes, folder: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "model"
    shutil.copytree(folder, hostile)
    whole = change if isinstance(change, bytes) else json.dumps(json.loads((hostile / name).read_text()) | change).encode()
    (hostile / name).write_bytes(whole)

    def refused() -> None:
        with pytest.raises(BadManifest) as caught:
            started_from(hostile, 100, 1e-3)
        assert caught.value.hint

    assert takes_at_most(3.0, refused)


def test_mutated_folders_end_in_a_declared_error_or_are_read(folder: Path, tmp_path: Path) -> None:
    rng, hostile = random.Random(4), tmp_path / "model"
    for _ in range(40):
        shutil.copytree(folder, hostile)
        name = rng.choice(["config.json", "config.json", "model.safetensors"])
        content = (hostile / name).read_bytes()
        is_json = name == "config.json" and rng.random() < 0.8
        (hostile / name).write_bytes(mutated_json(content.decode(), rng).encode() if is_json else mutated_bytes(content, rng))
        with contextlib.suppress(BadManifest):
            started_from(hostile, 100, 1e-3)
        shutil.rmtree(hostile)


def test_sequences_fit_a_model_that_has_another_name_for_its_positions(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert fine_tuned(started_from(tmp_path, 100, 1e-3), tmp_path, 0, "pairs").inner.sequence_length == 64


BERT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 32, "is_decoder": False,
}  # fmt: skip


def saved_bert(folder: Path, *, is_decoder: bool) -> Path:
    BertLMHeadModel(BertConfig(**BERT | {"is_decoder": is_decoder})).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_an_encoder_in_a_folder_is_refused(tmp_path: Path) -> None:
    """It would see the token that it predicts. The same layers as a decoder are accepted."""
    with pytest.raises(BadManifest, match="see the tokens that they predict") as caught:
        started_from(saved_bert(tmp_path / "encoder", is_decoder=False), 100, 1e-3)
    assert "is_decoder = true" in caught.value.hint
    decoder = Manifest.checked(started_from(saved_bert(tmp_path / "decoder", is_decoder=True), 100, 1e-3))
    load_start(decoder.model, tmp_path / "decoder", 0)


@pytest.mark.parametrize("max_positions", [2, 3, 32, 4096])
def test_a_causal_model_of_any_length_is_accepted(max_positions: int) -> None:
    before = torch.get_rng_state()
    model = build_model(ModelSection(config=LLAMA | {"max_position_embeddings": max_positions}), 1)
    assert model.training and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("config", "kind"), [(ViTConfig(), "vit"), (T5Config(), "t5")], ids=["vit", "t5"])
def test_another_kind_of_model_is_refused_in_one_sentence(config: PreTrainedConfig, kind: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(BadManifest) as caught:
        started_from(tmp_path, 100, 1e-3)
    assert str(caught.value) == f"{tmp_path} is a '{kind}' model, which is no causal language model"
    assert "llama" in caught.value.hint
