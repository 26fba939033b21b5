"""A LoRA adapter: what trains, with which first values, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from gossamer.peer.machine.home import Home
from gossamer.peer.machine.room import size_of
from gossamer.peer.model.activation_memory import activation_bytes
from gossamer.peer.model.adapter import add_adapter, factors, merge_adapter, trained_parameters, write_adapter
from gossamer.peer.model.model import frozen_shapes, model_config, parameter_shapes, state_tensors, unset_model
from gossamer.peer.model.start import base_folder, initial_model, keep_base, load_start, started_from
from gossamer.peer.model.throughput import flops_per_token
from gossamer.peer.model.weights import set_weights
from gossamer.protocol.errors import BadManifest, BadSettings
from gossamer.protocol.run.layout import layout_digest
from gossamer.protocol.run.manifest import Manifest
from tests.peer.fine_tuned import base_model, tuned_manifest

TOKENS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"))


def changed_factors(model: Any) -> Any:
    with torch.no_grad():
        for number, factor in enumerate((factors(model) or {}).values()):
            factor += 0.05 * torch.randn(factor.shape, generator=torch.Generator().manual_seed(number))
    return model


def test_only_the_factors_train_and_at_first_they_change_nothing(folder: Path) -> None:
    manifest = tuned_manifest(folder, rank=4)
    model, base = initial_model(manifest, folder), AutoModelForCausalLM.from_pretrained(folder)
    found = state_tensors(model)
    assert found.keys() == trained_parameters(model).keys() == parameter_shapes(manifest.model).keys()
    assert all(".lora_" in name and parameter.requires_grad is (".lora_" in name) for name, parameter in found.items())
    assert layout_digest({name: tuple(tensor.shape) for name, tensor in found.items()}) == manifest.model.layout
    assert {name.replace(".base_layer", "") for name in frozen_shapes(manifest.model)} == {name for name, _ in base.named_parameters()}
    assert model.training and torch.equal(model.eval()(TOKENS).logits, base.eval()(TOKENS).logits)


def test_all_peers_begin_with_the_same_factors_whatever_they_drew_before(folder: Path) -> None:
    manifest, other_seed = tuned_manifest(folder), tuned_manifest(folder, run={"seed": 1})
    torch.manual_seed(1)
    one = state_tensors(initial_model(manifest, folder))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again, other = (state_tensors(initial_model(each, folder)) for each in (manifest, other_seed))
    assert all(torch.equal(tensor, again[name]) for name, tensor in one.items())
    assert all(torch.equal(tensor, other[name]) is name.endswith("lora_B.default.weight") for name, tensor in one.items())
    assert torch.get_rng_state().shape == before.shape


@pytest.mark.parametrize(
    ("keys", "reason", "hint"),
    [
        ({"lora_rank": 33}, "lora_rank is 33, and the layer model.layers.0.self_attn.q_proj is 32 wide", "to 32 or less"),
        ({"lora_targets": ["query"]}, "takes no adapter|no layer 'query'", "q_proj"),
        ({"lora_targets": ["q_proj", "query"]}, "no layer 'query'", "down_proj, gate_proj, k_proj, lm_head"),
        ({"lora_targets": ["embed_tokens"]}, "embed_tokens is no linear layer", "q_proj"),
    ],
)
def test_an_impossible_adapter_is_refused_without_any_weights(keys: dict[str, Any], reason: str, hint: str, folder: Path) -> None:
    with pytest.raises(BadManifest, match=reason) as caught:
        parameter_shapes(tuned_manifest(folder, model=keys).model)
    assert hint in caught.value.hint


def test_an_adapter_of_a_head_that_is_tied_is_refused(tmp_path: Path) -> None:
    tied = base_model(tmp_path, tie_word_embeddings=True)
    with pytest.raises(BadManifest, match="shares its weights"):
        parameter_shapes(tuned_manifest(tied, model={"lora_targets": ["lm_head"]}).model)


def test_another_base_is_refused_with_both_digests_and_a_missing_one_with_its_own(folder: Path, tmp_path: Path) -> None:
    manifest = tuned_manifest(folder)
    with pytest.raises(BadManifest, match=rf"their digest is [0-9a-f]{{64}}, the manifest's {manifest.model.base}") as caught:
        load_start(manifest.model, base_model(tmp_path / "other", seed=6), 0)
    assert "without them no peer can take part" in caught.value.hint
    with pytest.raises(BadSettings, match=manifest.model.base or "") as missing:
        initial_model(manifest, None)
    assert "--model FOLDER" in missing.value.hint


def test_a_base_in_another_number_format_with_the_same_values_is_the_same(folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    half = tmp_path / "half"
    (half / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    widened = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    widened.save_pretrained(tmp_path / "full")
    section = Manifest.checked(started_from(half, 10, 1e-3)).model
    assert load_start(section, tmp_path / "full", 0).dtype is torch.float32


def test_the_home_remembers_the_base(folder: Path, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    assert base_folder(home) is None
    keep_base(home, tmp_path)
    keep_base(home, folder)
    assert base_folder(home) == folder.resolve() and base_folder(home, tmp_path) == tmp_path
    assert size_of(home.path) < 1000, "what the link leads to is not the home's"
    keep_base(home, tmp_path / "gone")
    assert base_folder(home) is None


@pytest.mark.filterwarnings("default:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_peft_loads_what_is_written_and_the_merged_model_is_the_same(folder: Path, tmp_path: Path) -> None:
    manifest = tuned_manifest(folder)
    model = changed_factors(initial_model(manifest, folder)).eval()
    write_adapter(model, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    with torch.no_grad():
        expected, plain = model(TOKENS).logits, AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits
        assert torch.allclose(loaded(TOKENS).logits, expected, atol=1e-6) and not torch.allclose(plain, expected, atol=1e-3)
        merge_adapter(model)
        model.save_pretrained(tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.allclose(merged(TOKENS).logits, expected, atol=1e-5)
    assert factors(model) is None and merged.state_dict().keys() == AutoModelForCausalLM.from_pretrained(folder).state_dict().keys()


def test_a_rank_without_the_folder_builds_the_same_layout(folder: Path) -> None:
    manifest = tuned_manifest(folder)
    unset = unset_model(manifest.model, torch.device("cpu"))
    set_weights(unset, state_tensors(initial_model(manifest, folder)))
    assert list(state_tensors(unset)) == list(parameter_shapes(manifest.model))


def test_what_a_batch_leaves_in_the_model_is_counted_without_it(folder: Path) -> None:
    adapted, whole = tuned_manifest(folder, rank=2), tuned_manifest(folder, rank=0)
    counts = [activation_bytes(manifest.model, 2, 16) for manifest in (adapted, whole)]
    assert 0 < counts[0] < 2 * counts[1]
    assert activation_bytes(adapted.model, 4, 16) > 1.9 * counts[0]


def test_a_frozen_weight_costs_two_thirds_of_one_that_trains(folder: Path) -> None:
    adapted, whole = tuned_manifest(folder, rank=4).model, tuned_manifest(folder, rank=0).model
    config = model_config(adapted)
    under = flops_per_token(config, {}, 16, frozen_shapes(adapted))
    trained, factors_alone = (flops_per_token(config, parameter_shapes(section), 16) for section in (whole, adapted))
    attention = flops_per_token(config, {}, 16) + 6 * config.vocab_size * config.hidden_size
    assert under - attention == pytest.approx((trained - attention) * 2 / 3)
    assert flops_per_token(config, parameter_shapes(adapted), 16, frozen_shapes(adapted)) < trained + factors_alone


def test_layers_of_another_kind_are_adapted_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    manifest = tuned_manifest(base_model(tmp_path), model={"lora_targets": ["c_attn"]})
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=260))
    add_adapter(model, manifest.model)
    assert {tuple(factor.shape) for factor in (factors(model) or {}).values()} == {(4, 32), (96, 4)}
    assert "fan_in" not in capfd.readouterr().err
