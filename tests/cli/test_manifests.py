"""Manifests from files and options."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.cli.manifests import changed, pins_of, read_manifest, tried, with_pins
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.model.model import parameter_shapes
from gossamer.peer.text.tokenizer import byte_tokenizer, load_tokenizer
from gossamer.peer.trainer.pins import pins
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.layout import layout_digest
from gossamer.protocol.run.manifest import Manifest
from gossamer.protocol.run.sections import DEMO_LLAMA


def test_no_file_means_the_default_run() -> None:
    assert read_manifest(None) == Manifest()
    assert read_manifest(None, own_text=True).data.source == "text"


def test_nothing_given_changes_nothing() -> None:
    assert changed(Manifest(), {}).run_id == Manifest().run_id


def test_each_change_makes_it_another_run() -> None:
    changes = [changed(Manifest(), {name: value}) for name, value in (("steps", 9), ("seed", 9), ("codec", "fp32"))]
    assert len({manifest.run_id for manifest in (Manifest(), *changes)}) == 4


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[run\n", b"[run]\ntotal_stepz = 5\n"])
def test_a_file_that_is_no_manifest_is_refused_with_a_hint(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(BadManifest) as caught:
        read_manifest(file)
    assert caught.value.hint


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadManifest, match="run.toml: No such file"):
        read_manifest(tmp_path / "run.toml")


@pytest.mark.timeout(240)  # a process that loads torch and transformers
def test_a_host_pins_the_layout_and_the_tokenizer_unless_it_is_bytes(tmp_path: Path) -> None:
    bytes_only, config = Manifest(), PeerConfig(home=tmp_path / "home", devices="cpu")
    assert with_pins(bytes_only, pins(bytes_only, None, config)) == bytes_only
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "the end"})
    tokenizer.save_pretrained(tmp_path)
    wanted = Manifest.checked({"tokenizer": {"name": str(tmp_path)}, "model": {"config": DEMO_LLAMA | {"vocab_size": 300}}})
    found = tried(wanted, None, config)
    assert found.tokenizer.digest == load_tokenizer(found.tokenizer).digest
    assert found.model.layout == layout_digest(parameter_shapes(found.model))
    assert with_pins(wanted, pins_of(found)) == found == with_pins(found, pins(found, None, config))


def test_stages_make_a_staged_run_and_one_stage_none() -> None:
    assert changed(Manifest(), {"stages": 1}).run_id == Manifest().run_id
    staged = changed(Manifest(), {"stages": 2})
    assert staged.num_stages == 2 and changed(staged, {"stages": 1}).run_id == Manifest().run_id
    written = Manifest.from_toml(Manifest().to_toml().replace("tie_word_embeddings = true", "tie_word_embeddings = false"))
    assert changed(written, {"stages": 2}).num_stages == 2
    with pytest.raises(BadManifest, match="set tie_word_embeddings = false"):
        changed(Manifest.from_toml(Manifest().to_toml()), {"stages": 2})
