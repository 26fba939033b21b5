"""The files and the loss of a language model that is put together from its stages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from safetensors.torch import save_file
from torch import Tensor

from gossamer.peer.machine.home import Home
from gossamer.peer.machine.room import memory_room
from gossamer.peer.model.card import MeasuredLoss
from gossamer.peer.model.model import hollow_model, model_config, quiet_transformers
from gossamer.peer.model.text_export import measure, set_token_ids, text_model
from gossamer.peer.model.weights import Show, writing
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

INDEX: Final = "model.safetensors.index.json"  # as transformers names it


def measure_stages(
    stages: Sequence[Mapping[str, Tensor]], manifest: Manifest, home: Home, data: Path | None, num_tokens: int | None, show: Show
) -> MeasuredLoss:
    """As `measure`, of a model put together from its stages, if this machine's memory holds it. Raises BadSettings."""
    if num_tokens == 0:
        return MeasuredLoss(None, reason="as asked")
    num_bytes, room = sum(tensor.nbytes for weights in stages for tensor in weights.values()), memory_room(0)
    if num_bytes > room.num_bytes:
        return MeasuredLoss(
            None, reason=f"the whole model takes {num_bytes / 1e9:.1f} GB, and {room.num_bytes / 1e9:.1f} GB are {room.limit}"
        )
    weights = {name: tensor for part in stages for name, tensor in part.items()}
    return measure(text_model(manifest, home, weights), manifest, home, data, num_tokens, show)


def write_stages(stages: Sequence[Mapping[str, Tensor]], manifest: Manifest, home: Home, folder: Path) -> None:
    """Write the files of AutoModelForCausalLM, the weights of each stage in a file of their own, and of AutoTokenizer. Raises OSError."""
    tokenizer, config = load_tokenizer(manifest.tokenizer, home.tokenizer), model_config(manifest.model)
    config.architectures = [type(hollow_model(manifest.model)).__name__]
    set_token_ids(config, tokenizer)
    with quiet_transformers(), writing():
        _write_shards(stages, config, folder)
        tokenizer.save(folder)


def _write_shards(stages: Sequence[Mapping[str, Tensor]], config: PreTrainedConfig, folder: Path) -> None:
    """Write a file of weights for each stage, their index, and the config, as transformers loads them."""
    folder.mkdir()
    config.save_pretrained(folder)
    weight_map = dict[str, str]()
    for number, weights in enumerate(stages, 1):
        file = f"model-{number:05d}-of-{len(stages):05d}.safetensors"
        weight_map |= dict.fromkeys(weights, file)
        save_file(dict(weights), folder / file, metadata={"format": "pt"})
    num_bytes = sum(tensor.nbytes for weights in stages for tensor in weights.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": weight_map}, indent=1) + "\n")
