"""Manifests of fine-tuning runs: what they add to a text run's, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.manifest import Manifest, SignedManifest, need_text
from tests.protocol.samples import ISSUER

BASE = "ab" * 32
RUN_ID = "c7b7ee0b8830381bda7ac22336ac7e7a22b15b8b137b260af7fa99320043c092"


def tuned(**sections: dict[str, Any]) -> Manifest:
    given: dict[str, dict[str, Any]] = {
        "model": {"base": BASE, "lora_rank": 8},
        "data": {"source": "text", "format": "chat", "column": "messages"},
    }
    return Manifest.checked({name: given.get(name, {}) | sections.get(name, {}) for name in {*given, *sections}})


def test_its_tables_and_its_toml_and_its_signed_bytes_are_read_as_a_fine_tuning_run() -> None:
    manifest = tuned().with_host(ISSUER.peer_id)
    assert manifest.is_fine_tuning
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    read = SignedManifest.from_bytes(SignedManifest.sign(manifest, ISSUER).to_bytes()).manifest()
    assert read == manifest and read.run_id == manifest.run_id and need_text(read) is read
    assert read.has_start(is_founder=False), "an adapter's first factors follow from the seed"


def test_its_run_id_does_not_change_by_accident() -> None:
    assert tuned().run_id.hex() == RUN_ID, "canonical bytes or a default have changed: every existing run gets another id"


def test_by_default_a_run_trains_all_weights_on_every_token() -> None:
    assert not Manifest().is_fine_tuning


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
    ],
)
def test_what_does_not_fit_together_is_refused(section: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadManifest, match=reason) as caught:
        tuned(**{section: keys})
    assert caught.value.hint


def test_answers_may_train_all_weights_and_text_an_adapter() -> None:
    full = tuned(model={"base": None, "lora_rank": 0, "weights": BASE})
    assert full.data.has_prompts and not full.has_start(is_founder=True)
    adapted = tuned(data={"format": "text", "source": "builtin"})
    assert adapted.is_fine_tuning and not adapted.data.has_prompts
