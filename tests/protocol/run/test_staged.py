"""Manifests of staged runs: what they add to a text run's, what they refuse, and the count that they need."""

from __future__ import annotations

import pytest

from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.manifest import Manifest, SignedManifest, StagedManifest, need_text
from tests.protocol.samples import ISSUER

RUN_ID = "68cb963891e406cd67181e41d88f0a0aae4907e55c8360bacb508881c1561c45"


def staged(text: str = "") -> StagedManifest:
    manifest = Manifest.from_toml("[stages]\ncount = 2\n" + text)
    assert isinstance(manifest, StagedManifest)
    return manifest


def test_its_tables_and_its_toml_and_its_signed_bytes_are_read_as_a_staged_run() -> None:
    manifest = staged("micro_batch = 2\nblocks = [1, 3]").with_host(ISSUER.peer_id)
    assert manifest.num_stages == 2 and manifest.stages.blocks == (1, 3)
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    read = SignedManifest.from_bytes(SignedManifest.sign(manifest, ISSUER).to_bytes()).manifest()
    assert read == manifest and read.run_id == manifest.run_id and need_text(read) is read


def test_its_run_id_does_not_change_by_accident() -> None:
    assert staged().run_id.hex() == RUN_ID, "canonical bytes or a default have changed: every existing run gets another id"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[run]\naccess = 'open'", 'run.access is "open": a staged run sends labels and hidden states'),
        ("micro_batch = 3", "inner.batch_size is 4, not a multiple of stages.micro_batch, 3"),
        ("blocks = [4]", "blocks has 1 numbers for 2 stages"),
        ("blocks = [0, 4]", r"stages\.blocks\.0 is 0"),
        ("activations = 'int2'", 'stages.activations is "int2"'),
        ("bloks = [1, 3]", r"stages\.bloks is not a key of a manifest; did you mean stages\.blocks"),
        ("[model.config]\ntie_word_embeddings = true", "set tie_word_embeddings = false"),
        ("[model]\nlora_rank = 8\nbase = '" + "ab" * 32 + "'", "a staged run trains all weights on all tokens: leave out lora_rank"),
        ("[data]\nsource = 'text'\nformat = 'chat'", "a staged run trains all weights on all tokens: leave out lora_rank"),
    ],
)
def test_what_cannot_work_is_refused_with_a_hint(text: str, reason: str) -> None:
    with pytest.raises(BadManifest, match=reason) as caught:
        staged(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[stages]\ncount = 0", "stages.count is 0"),
        ("[stages]\ncount = 1", "stages.count is 1: should be greater than or equal to 2"),
        ("[stages]", "stages.count: Field required"),
        ("[stages]\ncuont = 2", r"stages\.cuont is not a key of a manifest; did you mean stages\.count"),
    ],
)
def test_a_count_that_is_none_is_refused(text: str, reason: str) -> None:
    with pytest.raises(BadManifest, match=reason) as caught:
        Manifest.from_toml(text)
    assert caught.value.hint
