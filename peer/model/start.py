"""Initial weights from a folder in the format of transformers, instead of random ones.

The manifest names them by digest. A peer without a copy of the folder receives the weights of training peers, like every later joiner.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from gossamer.peer.model.computing import need_causal
from gossamer.peer.model.model import auto_classes, bounded_size, model_config, need_language_model, pretrained, state_tensors
from gossamer.peer.model.trainable import weights_digest
from gossamer.peer.text.tokenizer import name_of
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.layout import layout_digest
from gossamer.protocol.run.sections import DEMO_LLAMA, ModelSection, need_config_integer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOT_OF_THE_MODEL: Final = {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache"}
PARAMETERS_PER_BYTE: Final = 8  # more than any number format; missing parameters would take memory without a file
MAX_CONFIG_CHARS: Final = 1 << 20  # of config.json; longer ones do not parse
REWARM_SHARE: Final = 3  # of the peak rate of a new run: enough to move trained weights, too little to undo them (arXiv 2308.04014)
WARM_SHARE: Final = 100  # of the steps are warm-up


def load_start(section: ModelSection, folder: Path) -> PreTrainedModel:
    """Build a run's model with the weights in a folder, in float32 on the CPU, in training mode.

    Raises BadManifest for a folder without weights, for a model that sees later tokens, and, with both digests, for weights that differ
    from the manifest's.
    """
    with auto_classes(str(folder)) as (_, auto_model):
        model = pretrained(auto_model, str(folder), config=model_config(section))
        need_causal(model, str(folder))
    digest = weights_digest(state_tensors(model))
    if digest != section.weights:
        raise BadManifest(
            f"the weights in {folder} differ from the initial weights of the run: their digest is {digest}, the manifest's "
            f"{section.weights}",
            hint="give --model the folder of the run's host, or leave it out to receive the weights from other peers",
        )
    model.train()
    return model


def _need_bounded_config(file: Path) -> None:
    """Raise ValueError for a config with integers that no model has: transformers would make lists of their length."""
    with file.open(encoding="utf-8") as opened:
        left = [("config", json.loads(opened.read(MAX_CONFIG_CHARS)))]
    while left:
        name, value = left.pop()
        match value:
            case bool():
                continue
            case int():
                need_config_integer(value, name)
            case dict():
                left += [(f"{name}.{key}", item) for key, item in value.items()]
            case list():
                left += [(name, item) for item in value]


def started_from(folder: Path, total_steps: int, learning_rate: float) -> dict[str, dict[str, Any]]:
    """Return manifest tables for training that continues from a folder: model and tokenizer with digests, and a re-warmed rate.

    Raises BadManifest for a folder that holds no causal language model with a tokenizer.
    """
    with auto_classes(str(folder)) as (auto_config, auto_model):
        _need_bounded_config(folder / "config.json")
        config = auto_config.from_pretrained(folder, trust_remote_code=False)
        need_language_model(config, str(folder))
        with torch.device("meta"), bounded_size():
            described = state_tensors(auto_model.from_config(config))
        num_params = sum(tensor.numel() for tensor in described.values())
        num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if num_params > PARAMETERS_PER_BYTE * num_bytes:
            raise BadManifest(
                f"{folder} describes {num_params} parameters, and its weights have {num_bytes} bytes",
                hint="take a folder with whole weights in safetensors files, as transformers saves it",
            )
        model = pretrained(auto_model, str(folder), config=config)
    given, all_fields = config.to_diff_dict(), config.to_dict()
    given |= {name: all_fields[name] for name in DEMO_LLAMA if name in all_fields}
    fields = {name: value for name, value in given.items() if name not in NOT_OF_THE_MODEL and value is not None}
    tensors = state_tensors(model)
    name, digest = name_of(folder)
    tables = {
        "model": {
            "architecture": config.model_type,
            "config": fields,
            "layout": layout_digest({name: tuple(tensor.shape) for name, tensor in tensors.items()}),
            "weights": weights_digest(tensors),
        },
        "tokenizer": {"name": name, **({"digest": digest} if digest else {})},
        "inner": {"learning_rate": learning_rate / REWARM_SHARE, "warmup_steps": max(1, total_steps // WARM_SHARE)},
    }
    load_start(ModelSection.model_validate(tables["model"]), folder)  # another config could read other weights from the same files
    return tables
