"""Initial weights from a folder in the format of transformers, instead of random ones.

The manifest names them by digest. A peer without a copy of the folder receives the weights of training peers, like every later joiner.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from gossamer.peer.machine.extras import need_extra
from gossamer.peer.machine.home import Home
from gossamer.peer.model.adapter import add_adapter, set_initial_factors
from gossamer.peer.model.computing import need_causal
from gossamer.peer.model.model import (
    auto_classes,
    bounded_size,
    build_model,
    model_config,
    need_language_model,
    parameter_shapes,
    pretrained,
    state_tensors,
)
from gossamer.peer.model.trainable import shapes_of, weights_digest
from gossamer.peer.text.conversations import chat_template, template_digest
from gossamer.peer.text.tokenizer import load_tokenizer, name_of
from gossamer.protocol.errors import BadManifest, BadSettings
from gossamer.protocol.run.layout import layout_digest
from gossamer.protocol.run.manifest import Manifest
from gossamer.protocol.run.sections import ADAMW_RATE, DEMO_LLAMA, ModelSection, TokenizerSection, need_config_integer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NOT_OF_THE_MODEL: Final = {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache"}
PARAMETERS_PER_BYTE: Final = 8  # more than any number format; missing parameters would take memory without a file
MAX_CONFIG_CHARS: Final = 1 << 20  # of config.json; longer ones do not parse
SEQUENCE_LENGTH: Final = 512  # of a fine-tuning run: most conversations fit
ADAPTER_RATE: Final = 2e-4  # with adamw; usual for adapters of models of a billion parameters and more
COLUMNS: Final = {"chat": "messages", "pairs": "completion"}  # usual names
REWARM_SHARE: Final = 3  # of the peak rate of a new run: enough to move trained weights, too little to undo them (arXiv 2308.04014)
WARM_SHARE: Final = 100  # of the steps are warm-up


def initial_model(manifest: Manifest, folder: Path | None) -> PreTrainedModel:
    """Build a run's model as a peer begins; `folder` may hold its weights, which an adapter needs. Without a folder, others' replace them.

    Raises BadManifest as `load_start`, and BadSettings without a folder for a run with an adapter.
    """
    section, seed = manifest.model, manifest.run.seed
    need_base(section, folder)
    need_no_folder(section)
    return build_model(section, seed) if folder is None or not _given_digest(section) else load_start(section, folder, seed)


def need_base(section: ModelSection, folder: Path | None) -> None:
    """Raise OperatorError where a run has an adapter, and its package or a folder that may hold the frozen weights is missing."""
    if not section.has_adapter:
        return
    need_extra("lora")
    if folder is None:
        raise BadSettings(
            f"this run fine-tunes a model that each peer has in a folder, and none was given; the digest of its weights is {section.base}",
            hint="pass --model FOLDER with the weights of the run's host as transformers saves them, in any number format",
        )


def need_no_folder(section: ModelSection) -> None:
    """Raise BadManifest if a run's model is not of the hub, but in a folder of this machine: its weights would go to the other members."""
    if section.hub is not None and Path(section.hub).exists():
        raise BadManifest(
            f"the manifest names {section.hub} as a model of the hub, and that is a folder of this machine: its weights would be shared",
            hint="set [model] hub to org/name; as the host, `peer init --from FOLDER` names the weights in a folder by their digest",
        )


def base_folder(home: Home, given: Path | None = None) -> Path | None:
    """Return the folder with a run's frozen weights: the one that was given, else that of an earlier start, if it is still there."""
    return given or (home.base.resolve() if home.base.exists() else None)


def keep_base(home: Home, folder: Path) -> None:
    """Remember the folder with a run's frozen weights for later starts, `peer eval` and `peer export`. Raises BadSettings."""
    try:
        home.base.unlink(missing_ok=True)
        home.base.symlink_to(folder.absolute())
    except OSError as error:
        raise BadSettings(f"{home.base} cannot be written: {error.strerror}", hint="free some space, or choose another --home") from error


def _given_digest(section: ModelSection) -> str | None:
    """Return the digest of the weights that a run begins with; None for random ones."""
    return section.base if section.has_adapter else section.weights


def load_start(section: ModelSection, folder: Path, seed: int) -> PreTrainedModel:
    """Build a run's model with the weights in a folder, in float32 on the CPU, in training mode; with its adapter, from the run's seed.

    Raises BadManifest for a folder without weights, for a model that sees later tokens, and, with both digests, for weights that differ
    from the manifest's.
    """
    with auto_classes(str(folder)) as (_, auto_model):
        model = pretrained(auto_model, str(folder), config=model_config(section))
        need_causal(model, str(folder))
    digest = weights_digest(state_tensors(model))
    if digest != (wanted := _given_digest(section)):
        otherwise = (
            "; without them no peer can take part" if section.has_adapter else ", or leave it out to receive the weights from others"
        )
        raise BadManifest(
            f"the weights in {folder} differ from the initial weights of the run: their digest is {digest}, the manifest's {wanted}",
            hint=f"give --model the folder of the run's host{otherwise}",
        )
    add_adapter(model, section)
    set_initial_factors(model, seed)
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
            "layout": layout_digest(shapes_of(tensors)),
            "weights": weights_digest(tensors),
        },
        "tokenizer": {"name": name, **({"digest": digest} if digest else {})},
        "inner": {
            "learning_rate": learning_rate / REWARM_SHARE,
            "warmup_steps": max(1, total_steps // WARM_SHARE),
            "sequence_length": min(Manifest().inner.sequence_length, _longest(config)),
        },
    }
    load_start(Manifest.checked(tables).model, folder, 0)  # another config could read other weights from the same files
    return tables


def _longest(config: PreTrainedConfig) -> int:
    """Return how many positions a model takes, whatever its config calls them."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or SEQUENCE_LENGTH


def fine_tuned(tables: Mapping[str, dict[str, Any]], folder: Path, rank: int, data_format: str) -> Manifest:
    """Return the manifest of a run that fine-tunes a model, from the tables of `started_from`: an adapter of this rank, 0 for all weights.

    Raises BadManifest for a rank above a layer's width, and for `chat` with a tokenizer that has no chat template.
    """
    model, inner = dict(tables["model"]), dict(tables["inner"])
    data: dict[str, Any] = {"source": "text", "format": data_format}
    longest = _longest(model_config(Manifest.checked({"model": model}).model))
    inner |= {"optimizer": "adamw", "sequence_length": min(SEQUENCE_LENGTH, longest)}
    if rank:
        del model["layout"]
        model |= {"base": model.pop("weights"), "lora_rank": rank, "lora_alpha": 2 * rank}
        model["layout"] = layout_digest(parameter_shapes(Manifest.checked({"model": model}).model))
        inner |= {"learning_rate": ADAPTER_RATE, "weight_decay": 0.0}
    else:
        inner["learning_rate"] = ADAMW_RATE / REWARM_SHARE
    if data_format != "text":
        data |= {"column": COLUMNS[data_format], "mask_documents": True}
    if data_format == "chat":
        data["template"] = template_digest(chat_template(load_tokenizer(TokenizerSection.model_validate(tables["tokenizer"]), folder)))
    return Manifest.checked({"model": model, "tokenizer": tables["tokenizer"], "data": data, "inner": inner})
