"""Manifests that this build cannot train, as far as their values tell."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from gossamer.optim.codecs import CODECS
from gossamer.optim.names import METHOD_NAMES, SIMULATED_NAMES
from gossamer.peer.model.abilities import need_abilities
from gossamer.peer.simulator.methods import METHODS
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.manifest import Manifest
from gossamer.protocol.run.sections import DEMO_LLAMA


def test_the_default_run_can_be_carried_out() -> None:
    need_abilities(Manifest())


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_can_be_used(codec: str) -> None:
    need_abilities(Manifest.checked({"codec": {"name": codec}}))


@pytest.mark.parametrize(
    ("section", "key", "name", "near"),
    [("outer", "method", "nolocoo", "noloco"), ("inner", "optimizer", "adam", "adamw"), ("codec", "name", "fp31", "fp32")],
)
def test_an_unknown_name_is_refused_with_suggestions(section: str, key: str, name: str, near: str) -> None:
    with pytest.raises(BadManifest, match=f'{section}.{key} = "{name}"') as caught:
        need_abilities(Manifest.checked({section: {key: name}}))
    assert near in caught.value.hint


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_for_real_peers_or_its_name_says_that_it_is_only_simulated(method: str) -> None:
    """One list of names for the simulator and for real peers: a new method that is in neither tuple fails here."""
    assert method in METHOD_NAMES + SIMULATED_NAMES, "see optim/names.py"
    manifest = Manifest.checked({"outer": {"method": method}})
    if method in METHOD_NAMES:
        need_abilities(manifest)
        return
    with pytest.raises(BadManifest, match="is only simulated") as caught:
        need_abilities(manifest)
    assert f"peer simulate --method {method}" in caught.value.hint


@pytest.mark.parametrize("removed", ["topk", "topk12"])
def test_a_manifest_with_a_removed_codec_loads_and_is_refused_with_all_codecs(removed: str) -> None:
    """Codecs that a run could choose: every other codec of old manifests is still there, and `noloco` was the only method."""
    old = Manifest.from_toml(f'[codec]\nname = "{removed}"\n')
    with pytest.raises(BadManifest, match=f'codec.name = "{removed}"') as caught:
        need_abilities(old)
    assert all(name in caught.value.hint for name in CODECS)


def llama(**config: Any) -> Manifest:
    return Manifest.checked({"model": {"config": DEMO_LLAMA | config}})


@pytest.mark.parametrize(
    ("config", "error", "hint"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads = 5 does not divide hidden_size = 128", "1, 2, 4, 8, 16, 32, 64, 128"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4", "1, 2, 4,"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_numbers_that_do(config: dict[str, Any], error: str, hint: str) -> None:
    with pytest.raises(BadManifest, match=error) as caught:
        need_abilities(llama(**config))
    assert hint in caught.value.hint


def test_heads_with_a_size_of_their_own_need_not_divide_the_width() -> None:
    need_abilities(llama(num_attention_heads=5, num_key_value_heads=5, head_dim=32))


def test_torch_is_not_imported() -> None:
    program = "import sys, gossamer.peer.model.abilities; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
