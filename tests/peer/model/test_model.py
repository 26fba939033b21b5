from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.peer.model.computing import next_token_loss
from gossamer.peer.model.model import build_model, check_fit, model_config, need_layout, num_parameters, parameter_shapes, unset_model
from gossamer.protocol import limits
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.layout import layout_digest
from gossamer.protocol.run.sections import ModelSection
from tests.peer.small import small_manifest
from tests.peer.trained_homes import LLAMA
from tests.processor_time import takes_at_most

GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 256, "n_positions": 64}


def section(architecture: str = "llama", config: dict[str, Any] | None = None) -> ModelSection:
    return ModelSection(architecture=architecture, config=LLAMA if config is None else config)


def from_folder(folder: Path | str) -> ModelSection:
    return ModelSection(hub=str(folder), revision="0" * 40)


def weights(seed: int) -> dict[str, Tensor]:
    return dict(build_model(section(), seed).named_parameters())


@pytest.fixture
def restored_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def test_equal_seeds_give_equal_weights(restored_threads: None) -> None:
    first = weights(7)
    torch.set_num_threads(2)
    torch.rand(5)
    second = weights(7)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], weights(8)["model.embed_tokens.weight"])
    assert all(tensor.dtype == torch.float32 for tensor in first.values())


def test_building_leaves_the_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build_model(section(), 1)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("model", [section(), section(config={**LLAMA, "tie_word_embeddings": False}), section("gpt2", GPT2)])
def test_shapes_are_those_of_the_model(model: ModelSection) -> None:
    built = {name: tuple(parameter.shape) for name, parameter in build_model(model, 0).named_parameters()}
    assert list(parameter_shapes(model).items()) == list(built.items())
    assert num_parameters(model) == sum(torch.Size(shape).numel() for shape in built.values())


def test_a_huge_model_has_shapes_at_once() -> None:
    huge = {**LLAMA, "hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 40}
    shapes = parameter_shapes(section(config=huge))
    assert shapes["model.layers.39.mlp.up_proj.weight"] == (32768, 8192)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LLAMA | {"hidden_size": 1 << 22, "intermediate_size": 1 << 22}, "parameters"),
        (LLAMA | {"vocab_size": 1 << 24, "hidden_size": 1 << 16}, "parameters"),
        ({"intermediate_size": 1 << 24, "num_hidden_layers": 1024, "hidden_size": 1 << 14, "num_attention_heads": 1 << 14}, "parameters"),
    ],
)
def test_a_model_that_nobody_could_send_is_refused_while_it_is_counted(config: dict[str, Any], reason: str) -> None:
    parameter_shapes(section())  # transformers is imported

    def refused() -> None:
        with pytest.raises(BadManifest, match=reason) as caught:
            parameter_shapes(section(config=config))
        assert caught.value.hint

    assert takes_at_most(0.5, refused)


def test_a_model_of_too_many_tensors_is_refused_while_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TENSORS", 12)
    parameter_shapes(section(config=LLAMA | {"num_hidden_layers": 1}))
    with pytest.raises(BadManifest, match="more than 12 tensors"):
        parameter_shapes(section(config=LLAMA | {"num_hidden_layers": 2}))


def test_tied_weights_count_once() -> None:
    assert "lm_head.weight" not in parameter_shapes(section())
    assert "lm_head.weight" in parameter_shapes(section(config={**LLAMA, "tie_word_embeddings": False}))


def test_a_folder_of_transformers_loads_with_its_own_weights(tmp_path: Path) -> None:
    saved = build_model(section(), 5)
    saved.save_pretrained(tmp_path)
    loaded = build_model(from_folder(tmp_path), 0)
    assert loaded.training
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True))
    assert list(parameter_shapes(from_folder(tmp_path))) == [name for name, _ in saved.named_parameters()]


def test_a_folder_without_all_weights_is_refused(tmp_path: Path) -> None:
    saved = build_model(section(), 5)
    saved.model.save_pretrained(tmp_path)
    config = {**LLAMA, "tie_word_embeddings": False, "num_hidden_layers": 3}
    model_config(section(config=config)).save_pretrained(tmp_path)
    with pytest.raises(BadManifest, match="lacks weights"):
        build_model(from_folder(tmp_path), 0)


@pytest.mark.parametrize(
    ("model", "message", "hint"),
    [
        (section("lama"), "'lama'", "llama"),
        (section("zzzzzzzz"), "zzzzzzzz", "causal"),
        (section("vit"), "'vit'", ""),
        (section(config={**LLAMA, "hiden_size": 3}), "'hiden_size'", "hidden_size"),
        (section(config={**LLAMA, "hidden_size": 33}), "multiple", "[model]"),
        (section(config={**LLAMA, "hidden_size": "big"}), "expected int", "[model]"),
        (from_folder("/no/such/folder"), "/no/such/folder", "[model]"),
    ],
)
def test_an_impossible_model_is_refused_with_the_reason(model: ModelSection, message: str, hint: str) -> None:
    with pytest.raises(BadManifest) as caught:
        build_model(model, 0)
    assert message in str(caught.value)
    assert hint in caught.value.hint
    with pytest.raises(BadManifest):
        parameter_shapes(model)


def test_the_model_must_fit_tokenizer_and_sequences() -> None:
    config = model_config(section())
    check_fit(config, 256, 64)
    with pytest.raises(BadManifest, match="257 tokens"):
        check_fit(config, 257, 64)
    with pytest.raises(BadManifest, match="64 positions"):
        check_fit(config, 256, 65)
    with pytest.raises(BadManifest, match="64 positions"):
        check_fit(model_config(section("gpt2", GPT2)), 256, 65)


def test_the_loss_is_the_mean_surprise_in_nats() -> None:
    model = build_model(section(), 0)
    tokens = torch.randint(0, 256, (3, 17), generator=torch.Generator().manual_seed(0))
    loss = next_token_loss(model, tokens)
    surprise = -torch.log_softmax(model(input_ids=tokens[:, :-1]).logits, -1)
    expected = torch.stack([surprise[b, i, tokens[b, i + 1]] for b in range(3) for i in range(16)]).mean()
    torch.testing.assert_close(loss, expected)
    assert abs(loss.item() - 5.545) < 0.1
    loss.backward()  # type: ignore[no-untyped-call]


def test_a_model_without_its_weights_is_laid_out_alike() -> None:
    section = small_manifest().model
    unset, built = unset_model(section, torch.device("cpu")), build_model(section, 0)
    assert [(name, p.shape) for name, p in unset.named_parameters()] == [(name, p.shape) for name, p in built.named_parameters()]
    assert unset.training
    for one, other in zip(unset.buffers(), built.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    build_model(section("gpt2", GPT2), 0).save_pretrained(tmp_path)
    capfd.readouterr()
    build_model(section("gpt2", GPT2), 0)
    build_model(from_folder(tmp_path), 0)
    assert capfd.readouterr() == ("", "")


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    model = build_model(section(), 5)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(BadManifest, match="cannot be built"):
        build_model(from_folder(tmp_path), 0)


def test_another_layout_than_the_manifest_pins_is_refused_with_both_digests() -> None:
    shapes = parameter_shapes(section())
    digest = layout_digest(shapes)
    need_layout(section().model_copy(update={"layout": digest}), shapes)
    need_layout(section(), shapes)
    assert layout_digest(dict(reversed([*shapes.items()]))) != digest
    with pytest.raises(BadManifest) as caught:
        need_layout(section().model_copy(update={"layout": "0" * 64}), shapes)
    assert digest in str(caught.value) and "0" * 64 in str(caught.value)
