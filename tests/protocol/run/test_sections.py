from __future__ import annotations

from typing import Any

import pytest

from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.manifest import Manifest
from gossamer.protocol.run.sections import DEMO_LLAMA, ModelSection, OuterSection
from tests.protocol.samples import ALICE, BOB

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fault(**tables: Any) -> str:
    with pytest.raises(BadManifest) as caught:
        Manifest.checked(tables)
    assert caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "value", "legal"),
    [
        ("run", "name", "", "1 to 200 printable"),
        ("run", "name", "two\nlines", "1 to 200 printable"),
        ("run", "seed", -1, "greater than or equal to 0"),
        ("run", "seed", True, "valid integer"),
        ("run", "seed", 1.0, "valid integer"),
        ("run", "seed", 1 << 63, "less than or equal to"),
        ("run", "total_steps", 0, "greater than or equal to 1"),
        ("run", "access", "all", "'invite', 'allowlist' or 'open'"),
        ("run", "issuers", ["12D3Koo"], "is not a peer id"),
        ("run", "issuers", [str(ALICE.peer_id)] * 2, "each peer once"),
        ("run", "issuers", [str(ALICE.peer_id)] * 17, "at most 16 items"),
        ("run", "members", [str(ALICE.peer_id)], 'requires access = "allowlist"'),
        ("model", "config", 3, "should be a table"),
        ("tokenizer", "name", "", "1 to 200 printable"),
        ("data", "source", "web", "'builtin', 'text', 'huggingface' or 'mixture'"),
        ("inner", "learning_rate", 0.0, "greater than 0"),
        ("inner", "learning_rate", "2e-3", "valid number"),
        ("inner", "learning_rate", float("nan"), "finite number"),
        ("inner", "learning_rate", float("inf"), "finite number"),
        ("inner", "final_fraction", 1.1, "less than or equal to 1"),
        ("inner", "warmup_steps", -1, "greater than or equal to 0"),
        ("inner", "rewarm_steps", -1, "greater than or equal to 0"),
        ("inner", "momentum", 1.0, "less than 1"),
        ("inner", "beta1", 1.0, "less than 1"),
        ("inner", "beta2", -0.1, "greater than or equal to 0"),
        ("inner", "weight_decay", -0.1, "greater than or equal to 0"),
        ("inner", "clip_norm", 0, "greater than 0"),
        ("inner", "batch_size", 0, "greater than or equal to 1"),
        ("inner", "sequence_length", 1, "greater than or equal to 2"),
        ("inner", "optimizer", "Adam W", "lower-case"),
        ("outer", "method", "", "lower-case"),
        ("outer", "alpha", 1.0, "less than 1"),
        ("outer", "beta", 0, "greater than 0"),
        ("outer", "inner_steps", 0, "a positive whole number"),
        ("outer", "inner_steps", True, "a positive whole number"),
        ("outer", "inner_steps", "often", "auto"),
        ("fragments", "max_fragment_mb", 0.0, "greater than 0"),
        ("outer", "no_partner", "wait", "'solo' or 'defer'"),
        ("outer", "deadline_s", 0.5, "greater than or equal to 1"),
        ("outer", "max_clock_gap_steps", 0, "greater than or equal to 1"),
        ("fragments", "blocks_per_fragment", 0, "greater than or equal to 1"),
        ("codec", "name", "INT8", "lower-case"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_invalid_value_is_reported_with_its_key_and_the_legal_values(section: str, key: str, value: object, legal: str) -> None:
    reason = fault(**{section: {key: value}})
    assert reason.startswith(f"{section}.{key} is ")
    assert legal in reason


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"vocab_size": 10**12}, "config.vocab_size is 1000000000000"),
        ({"hidden_size": 10**9}, "config.hidden_size is 1000000000"),
        ({"hidden_size": -(10**9)}, "config.hidden_size is -1000000000"),
        ({"num_hidden_layers": 10**4}, "config.num_hidden_layers is 10000"),
        ({"n_layer": 10**4}, "config.n_layer is 10000"),
        ({"text_config": {"decoder_layers": 10**4}}, "config.text_config.decoder_layers is 10000"),
        ({"attention_types": [[["global"], 10**9]]}, "config.attention_types is 1000000000"),
    ],
)
def test_a_number_in_the_model_config_that_no_model_has_is_rejected(config: dict[str, Any], reason: str) -> None:
    assert reason in fault(model={"config": config})


@pytest.mark.parametrize("tables", [{"model": {"config": {"\x1b[2J\nhint: run this": 1 << 40}}}, {"run": {"name": "\x9b2J"}}])
def test_what_is_wrong_with_a_strangers_manifest_is_one_printable_line(tables: dict[str, Any]) -> None:
    assert fault(**tables).isprintable()


def test_the_config_of_a_large_model_passes() -> None:
    large = {"vocab_size": 262_144, "hidden_size": 16_384, "num_hidden_layers": 126, "max_position_embeddings": 10_000_000}
    ModelSection(config=large | {"rope_parameters": {"rope_theta": 1_000_000_000}})


def test_a_batch_of_more_tokens_than_anyone_trains_on_is_rejected() -> None:
    assert "tokens" in fault(inner={"batch_size": 1 << 20, "sequence_length": 1 << 24})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"outer": {"alpha": 0.9}}, "outer.gamma is 1.0: gamma must satisfy"),
        ({"outer": {"inner_steps": 1 << 48}}, "outer.max_clock_gap_steps is"),
        ({"inner": {"batch_size": 1 << 20}}, "inner.sequence_length is 128: a batch should have at most"),
    ],
)
def test_a_default_that_does_not_fit_the_other_keys_is_rejected_before_anyone_joins(given: dict[str, Any], reason: str) -> None:
    assert reason in fault(**given)


@pytest.mark.parametrize(("alpha", "bound"), [(0.0, 2.0), (0.5, 1.5), (0.9, 0.38)])
def test_gamma_is_limited_to_the_bound_of_stability(alpha: float, bound: float) -> None:
    OuterSection(alpha=alpha, gamma=bound - 1e-9)
    for gamma in (bound + 1e-9, 0.0, -0.7):
        reason = fault(outer={"alpha": alpha, "gamma": gamma})
        assert "gamma must satisfy 0 < gamma < 2(1 - alpha^2)" in reason
        assert f"{bound:.4g}" in reason


def test_the_bound_of_gamma_holds_only_for_noloco() -> None:
    OuterSection(method="diloco", alpha=0.9, gamma=1.0)


def test_the_default_clock_gap_follows_from_the_inner_steps() -> None:
    assert OuterSection().max_clock_gap_steps == 200
    assert OuterSection(inner_steps=40).max_clock_gap_steps == 320
    assert OuterSection(inner_steps=10, max_clock_gap_steps=5).max_clock_gap_steps == 5


def test_the_default_model_is_the_demo_llama() -> None:
    assert ModelSection().config == DEMO_LLAMA
    assert ModelSection().architecture == "llama"
    assert ModelSection().hub is None


def test_a_hub_model_needs_only_its_name_and_commit() -> None:
    model = ModelSection(hub="org/name", revision=COMMIT)
    assert (model.architecture, model.config) == ("", {})


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"hub": "org/name"}, "hub requires revision"),
        ({"hub": "org/name", "revision": "main"}, "branches and tags can move"),
        ({"revision": COMMIT}, "revision requires hub"),
        ({"hub": "org/name", "revision": COMMIT, "architecture": "llama"}, "either architecture and config, or hub and revision"),
        ({"hub": "org/name", "revision": COMMIT, "config": {"a": 1}}, "either architecture and config, or hub and revision"),
        ({"architecture": "gpt2"}, "requires config"),
        ({"architecture": "../llama", "config": {"a": 1}}, "should be a transformers model type"),
        ({"config": {"a": float("inf")}}, "config.a holds inf"),
        ({"config": {"a": [None]}}, "config.a holds None"),
        ({"config": {"a": {"b": {"c": {"d": {"e": 1}}}}}}, "config.a.b.c.d nests"),
        ({"config": {"a": 1 << 63}}, "config.a is"),
        ({"config": {"a": "\ud800"}}, "config.a holds"),
        ({"config": {"\ud800": 1}}, "config holds"),
    ],
    ids=str,
)
def test_a_model_has_exactly_one_source(model: dict[str, Any], reason: str) -> None:
    assert reason in fault(model=model)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"source": "huggingface"}, "requires name and revision"),
        ({"source": "huggingface", "name": "org/name"}, "requires name and revision"),
        ({"source": "text", "name": "org/name"}, 'require source = "huggingface"'),
        ({"revision": COMMIT}, 'require source = "huggingface"'),
    ],
    ids=str,
)
def test_a_data_set_of_the_hub_needs_a_revision_and_only_such_a_source_has_a_name(data: dict[str, Any], reason: str) -> None:
    assert reason in fault(data=data)


def test_a_data_set_in_a_folder_needs_no_revision() -> None:
    assert Manifest.checked({"data": {"source": "huggingface", "name": "/data/web"}}).data.revision is None


def test_an_allow_list_has_members() -> None:
    members = [str(ALICE.peer_id), str(BOB.peer_id)]
    assert Manifest.checked({"run": {"access": "allowlist", "members": members}}).run.members == tuple(members)
