"""A LoRA adapter on a model whose own weights are frozen: the layers of peft, with equal initial factors at every peer.

Only the factors train, travel and are kept; the frozen weights are known by their digest (start.py).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gossamer.peer.machine.extras import need_extra
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.sections import ALL_LINEAR, ModelSection

if TYPE_CHECKING:
    from peft import LoraConfig

PREFIX: Final = "base_model.model."  # of the names in peft's files
NAME: Final = "default"  # peft's for an only adapter
INNER, OUTER = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"  # how the names of factors end: [rank, in] and [out, rank]


def factors(model: nn.Module) -> dict[str, nn.Parameter] | None:
    """Return the factors of a model's adapter by name; None for a model without one."""
    if not hasattr(model, "peft_config"):
        return None
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name: the factors of an adapter, else all."""
    found = factors(model)
    return dict(model.named_parameters()) if found is None else found


def add_adapter(model: nn.Module, section: ModelSection) -> None:
    """Freeze a model and add the manifest's adapter, with undefined factors, on the devices of its layers; nothing for a run without one.

    Raises BadManifest for a target that the model does not have, or that is no linear layer, and for a rank above a layer's width.
    """
    if not section.has_adapter:
        return
    need_extra("lora")
    from peft import inject_adapter_in_model
    from peft.utils.error import NoMatchingPeftModuleError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its advice on layers of GPT-2, which it follows itself
            inject_adapter_in_model(lora_config(section), model)
    except (NoMatchingPeftModuleError, ValueError) as error:
        raise BadManifest(f"the model takes no adapter: {' '.join(str(error).split())[:300]}", hint=_linear_layers(model)) from error
    found = factors(model) or {}
    _need_targets(section, found, model)
    for name, factor in found.items():
        width = factor.shape[1] if name.endswith(INNER) else factor.shape[0]
        if section.lora_rank > width:
            layer = name.removesuffix(INNER).removesuffix(OUTER)
            raise BadManifest(
                f"lora_rank is {section.lora_rank}, and the layer {layer} is {width} wide",
                hint=f"set [model] lora_rank to {width} or less; 8 to 64 is usual",
            )


def set_initial_factors(model: nn.Module, seed: int) -> None:
    """Set the factors of a model's adapter from a run's seed: the outer ones to zero, so that the model is its base at first."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, factor in sorted((factors(model) or {}).items()):
            bound = 1.0 / math.sqrt(factor.shape[1]) if name.endswith(INNER) else 0.0
            factor.copy_(torch.empty(factor.shape).uniform_(-bound, bound, generator=generator))


def lora_config(section: ModelSection) -> LoraConfig:
    """Return peft's config of a run's adapter."""
    from peft import LoraConfig

    targets: Any = ALL_LINEAR if section.lora_targets == (ALL_LINEAR,) else list(section.lora_targets)
    return LoraConfig(r=section.lora_rank, lora_alpha=section.lora_alpha, target_modules=targets, task_type="CAUSAL_LM")


def write_adapter(model: Any, folder: Path) -> None:
    """Write a model's adapter in peft's format, without the weights under it. Raises errors of many types when the disk refuses."""
    folder.mkdir()
    named = {f"{PREFIX}{name.replace(f'.{NAME}.', '.')}": factor.detach().contiguous() for name, factor in (factors(model) or {}).items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(model.peft_config[NAME])
    config.inference_mode, config.target_modules = True, sorted(config.target_modules)  # a set: its order differs from start to start
    config.save_pretrained(folder)


def merge_adapter(model: Any) -> None:
    """Add a model's adapter to the weights under it, and remove it; nothing for a model without one."""
    if factors(model) is None:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]:
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())
    del model.peft_config


def _need_targets(section: ModelSection, found: Mapping[str, Tensor], model: Any) -> None:
    if others := [name for name, factor in found.items() if factor.dim() != 2 or not name.endswith((INNER, OUTER))]:
        raise BadManifest(f"{others[0].partition('.lora_')[0]} is no linear layer, so it takes no adapter", hint=_linear_layers(model))
    layers = {name.removesuffix(INNER) for name in found if name.endswith(INNER)}
    if getattr(model.config, "tie_word_embeddings", False) and (tied := {"lm_head", "embed_out"} & layers):
        raise BadManifest(f"{tied.pop()} shares its weights with the embedding, so no adapter of it can be merged", hint="leave it out")
    for target in section.lora_targets:
        if target != ALL_LINEAR and not any(f".{layer}".endswith(f".{target}") for layer in layers):
            raise BadManifest(f"the model has no layer {target!r} for an adapter", hint=_linear_layers(model))


def _linear_layers(model: nn.Module) -> str:
    names = {name.replace(".base_layer", "").rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    known = ", ".join(sorted(name for name in names if name != NAME))
    return f"set [model] lora_targets; the model's linear layers: {known or 'none'}"
