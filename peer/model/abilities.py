"""Whether this build supports a manifest, as far as its values alone tell. Does not import torch: a typing error is answered at once.

A manifest checks only the form of its names, since another release may know more of them. Unknown names are refused, never replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gossamer.optim.names import CODEC_NAMES, METHOD_NAMES, OPTIMIZER_NAMES, SIMULATED_NAMES, suggestion
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.manifest import Manifest, RunManifest

MOST_HEADS: Final = 128  # that an error suggests


def need_abilities(manifest: RunManifest) -> None:
    """Raise BadManifest, with the names that exist, for the first name that is unknown to this build."""
    chosen = [("outer.method", manifest.outer.method, METHOD_NAMES), ("codec.name", manifest.codec.name, CODEC_NAMES)]
    if isinstance(manifest, Manifest):
        chosen.append(("inner.optimizer", manifest.inner.optimizer, OPTIMIZER_NAMES))
    if (method := manifest.outer.method) in SIMULATED_NAMES:
        raise BadManifest(
            f'outer.method = "{method}" is only simulated: real peers meet in pairs and never wait for all others',
            hint=f"choose from {', '.join(METHOD_NAMES)}, or `peer simulate --method {method}`",
        )
    for key, name, known in chosen:
        if name not in known:
            raise BadManifest(f'{key} = "{name}" is unknown to this build', hint=suggestion(name, known))
    if isinstance(manifest, Manifest) and manifest.model.architecture == "llama":
        _need_whole_heads(manifest.model.config)


def _need_whole_heads(config: Mapping[str, Any]) -> None:
    """Raise BadManifest if attention heads do not divide what they share. Other architectures are checked when transformers builds them."""
    heads = config.get("num_attention_heads")
    shared = [("num_key_value_heads", config.get("num_key_value_heads"), "num_attention_heads", heads)]
    if "head_dim" not in config:
        shared.insert(0, ("num_attention_heads", heads, "hidden_size", config.get("hidden_size")))
    for key, given, whole_key, whole in shared:
        if isinstance(given, int) and isinstance(whole, int) and given > 0 and whole % given:
            would_do = [number for number in range(1, min(whole, MOST_HEADS) + 1) if whole % number == 0]
            raise BadManifest(
                f"model.config.{key} = {given} does not divide {whole_key} = {whole}",
                hint=f"choose {key} from {', '.join(map(str, would_do))}, or change {whole_key}",
            )
