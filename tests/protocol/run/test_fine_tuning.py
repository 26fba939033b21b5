"""Manifests of fine-tuning runs: what they add to a text run's, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.protocol import limits
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.manifest import FineTuningManifest, Manifest, SignedManifest, need_text
from tests.protocol.samples import ISSUER

BASE = "ab" * 32
RUN_ID = "f6a333191f6d1a4684c7732acce250e29eda33cf71fd8d21f99879174a9c6e52"


def tuned(**sections: dict[str, Any]) -> FineTuningManifest:
    given: dict[str, dict[str, Any]] = {
        "run": {"protocol": limits.FINE_TUNING_PROTOCOL},
        "model": {"base": BASE, "lora_rank": 8},
        "data": {"source": "text", "format": "chat", "column": "messages"},
    }
    manifest = Manifest.checked({name: given.get(name, {}) | sections.get(name, {}) for name in {*given, *sections}})
    assert isinstance(manifest, FineTuningManifest)
    return manifest


def test_its_tables_and_its_toml_and_its_signed_bytes_are_read_as_a_fine_tuning_run() -> None:
    manifest = tuned().with_host(ISSUER.peer_id)
    assert isinstance(manifest, FineTuningManifest)
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    read = SignedManifest.from_bytes(SignedManifest.sign(manifest, ISSUER).to_bytes()).manifest()
    assert read == manifest and read.run_id == manifest.run_id and need_text(read) is read
    assert read.has_start(is_founder=False), "an adapter's first factors follow from the seed"


def test_its_run_id_does_not_change_by_accident() -> None:
    assert tuned().run_id.hex() == RUN_ID, "canonical bytes or a default have changed: every existing run gets another id"


def test_a_text_run_has_none_of_its_keys() -> None:
    text = Manifest().canonical_bytes()
    assert not any(word in text for word in (b"lora", b"format", b"prompt_column", b"template", b'"base"'))


@pytest.mark.parametrize(
    ("section", "key", "value"), [("model", "lora_rank", 8), ("data", "format", "chat"), ("data", "prompt_column", "question")]
)
def test_a_text_run_with_one_of_its_keys_is_told_the_protocol(section: str, key: str, value: object) -> None:
    with pytest.raises(BadManifest, match=rf"{section}\.{key} is a key of a fine-tuning run: set \[run\] protocol = 3") as caught:
        Manifest.checked({section: {key: value}})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("section", "keys", "reason"),
    [
        ("model", {"base": None}, "lora_rank requires base"),
        ("model", {"lora_rank": 0}, "base requires lora_rank"),
        ("model", {"lora_rank": -1}, "greater than or equal to 0"),
        ("model", {"weights": BASE}, "leave out hub and weights"),
        ("model", {"lora_targets": []}, "at least 1 item"),
        ("model", {"lora_targets": ["all-linear", "q_proj"]}, "all-linear alone"),
        ("data", {"source": "builtin"}, 'requires source = "text"'),
        ("data", {"format": "talk"}, "'text', 'chat' or 'pairs'"),
        ("run", {"protocol": 1}, "is a key of a fine-tuning run"),
    ],
)
def test_what_does_not_fit_together_is_refused(section: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadManifest, match=reason) as caught:
        tuned(**{section: keys})
    assert caught.value.hint


def test_answers_may_train_all_weights_and_text_an_adapter() -> None:
    full = tuned(model={"base": None, "lora_rank": 0, "weights": BASE})
    assert full.data.has_prompts and not full.has_start(is_founder=True)
    assert not tuned(data={"format": "text", "source": "builtin"}).data.has_prompts
