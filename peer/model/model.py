"""The model of a run: built from its manifest with transformers, with equal initial weights at every peer, and its size.

The optimizers are in optim/; the trainer process (peer/trainer) owns the weights.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.peer.machine.extras import need_extra
from gossamer.peer.model.adapter import add_adapter, factors
from gossamer.peer.model.computing import LANGUAGE_MODEL, need_causal
from gossamer.peer.model.trainable import shapes_of
from gossamer.protocol import limits
from gossamer.protocol.errors import BadManifest, OperatorError
from gossamer.protocol.run.layout import Shapes, layout_digest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from gossamer.protocol.run.sections import ModelSection

# Older spellings that transformers still turns into rope_parameters itself.
LEGACY_FIELDS = frozenset({"rope_theta", "rope_scaling"})


def build_model(section: ModelSection, seed: int) -> PreTrainedModel:
    """Build the model in float32 on the CPU, in training mode.

    Its weights are random from `seed`, or those of the hub's revision; those under an adapter start.py loads. Random weights do not depend
    on the number of threads or on earlier draws, and torch's generator is restored. Raises BadManifest for an impossible model, and for one
    that sees later tokens.
    """
    with auto_classes(_name(section)) as (_, auto_model), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's only
        hub = section.hub
        model = _from_config(section) if hub is None else pretrained(auto_model, hub, revision=section.revision).train()
        need_causal(model, _name(section))
    return model


def unset_model(section: ModelSection, device: torch.device) -> PreTrainedModel:
    """Build the model in float32 on a device, in training mode, with undefined weights, to be set by the caller. Raises BadManifest."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        return _from_config(section)


def placed(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a model to a device, in place, and return it. Tied weights stay tied, also where torch copies each (accelerators of plugins)."""
    moved: PreTrainedModel = model.to(device)
    moved.tie_weights()
    return moved


def _from_config(section: ModelSection) -> PreTrainedModel:
    """Build the model, with its adapter, in float32 on torch's default device, in training mode. Raises BadManifest."""
    with auto_classes(_name(section)) as (_, auto_model):
        model: PreTrainedModel = auto_model.from_config(model_config(section), attn_implementation="sdpa", dtype=torch.float32)
        add_adapter(model, section)
    return model.train()


def model_config(section: ModelSection) -> PreTrainedConfig:
    """Make the transformers config. Raises BadManifest, with a suggestion, for an unknown architecture or field."""
    with auto_classes(_name(section)) as (auto_config, _):
        if section.hub is not None:
            config: PreTrainedConfig = auto_config.from_pretrained(section.hub, revision=section.revision, trust_remote_code=False)
            need_language_model(config, section.hub)
            return config
        _need_known("there is no model architecture", section.architecture, language_models(), LANGUAGE_MODEL)
        config_class = type(auto_config.for_model(section.architecture))
        known = {*inspect.signature(config_class).parameters, *config_class.attribute_map, *LEGACY_FIELDS}
        for name in section.config:
            _need_known("the model config has no field", name, known, f"see {config_class.__name__} in transformers")
        return config_class(**section.config)


def language_models() -> Iterable[str]:
    """Return the names of the architectures that transformers has as causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def need_language_model(config: PreTrainedConfig, name: str) -> None:
    """Raise BadManifest for the config of another kind of model, like an image classifier."""
    if config.model_type not in language_models():
        raise BadManifest(f"{name} is a {config.model_type!r} model, which is no causal language model", hint=LANGUAGE_MODEL)


def parameter_shapes(section: ModelSection) -> Shapes:
    """Return the names and shapes of what trains, in the model's order, tied parameters once, without allocating them.

    Raises BadManifest, as soon as it is sure, also for a model that is too large for any run.
    """
    return shapes_of(state_tensors(hollow_model(section)))


def frozen_shapes(section: ModelSection) -> Shapes:
    """Return the names and shapes of the weights under an adapter; none without one. Raises BadManifest, as `parameter_shapes`."""
    if not section.has_adapter:
        return {}
    return {name: tuple(tensor.shape) for name, tensor in hollow_model(section).named_parameters() if not tensor.requires_grad}


def hollow_model(section: ModelSection) -> PreTrainedModel:
    """Build the model on the meta device: its shapes alone. Raises BadManifest, as `parameter_shapes`."""
    with torch.device("meta"), bounded_size():
        return _from_config(section)


@contextlib.contextmanager
def bounded_size() -> Iterator[None]:
    """Raise BadManifest from the constructor of a model inside the context, once it has too many tensors or parameters."""
    num_values = 0
    counted: set[Tensor] = set()  # a tied one is registered twice

    def count(module: torch.nn.Module, name: str, parameter: Tensor | None) -> None:
        nonlocal num_values
        if parameter is None or parameter in counted:
            return
        counted.add(parameter)
        num_values += parameter.numel()
        if len(counted) > limits.TENSORS or num_values > limits.PARAMETERS:
            most = f"{limits.TENSORS} tensors" if len(counted) > limits.TENSORS else f"{limits.PARAMETERS / 1e9:.0f} billion parameters"
            raise BadManifest(f"the model has more than {most}, which no run can train", hint="correct [model] config in the manifest")

    counting = torch.nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        counting.remove()


def num_parameters(section: ModelSection) -> int:
    """Return the number of parameters. Raises BadManifest."""
    return sum(torch.Size(shape).numel() for shape in parameter_shapes(section).values())


def state_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a model's trained state by name, tied tensors once: its parameters, and its persistent buffers of floats.

    Peers average all of them. Tensors that follow from the config alone, like rotary frequencies, are not part of the state. Of a model
    with an adapter, the factors are all.
    """
    if (adapted := factors(model)) is not None:
        return dict(adapted)
    kept = set(model.state_dict(keep_vars=True))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept and buffer.is_floating_point()}
    return {**dict(model.named_parameters()), **buffers}


def need_layout(section: ModelSection, shapes: Shapes) -> None:
    """Raise BadManifest, with both digests, where the parameters' layout differs from the manifest's."""
    digest = layout_digest(shapes)
    if section.layout not in (None, digest):
        raise BadManifest(
            f"the parameter layout of {_name(section)} differs here: its digest is {digest}, the manifest's {section.layout}",
            hint="install the release of transformers that the run's host uses; as the host, correct [model] layout",
        )


def check_fit(config: PreTrainedConfig, vocab_size: int, sequence_length: int) -> None:
    """Refuse a model too small for the tokenizer's vocabulary or for the sequences. Raises BadManifest."""
    text = config.get_text_config()
    if text.vocab_size < vocab_size:
        raise BadManifest(
            f"the tokenizer has {vocab_size} tokens, the model knows {text.vocab_size}", hint=f"set vocab_size to {vocab_size} or more"
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and longest < sequence_length:
        raise BadManifest(
            f"sequence_length is {sequence_length}, the model takes {longest} positions at most",
            hint="lower sequence_length or raise max_position_embeddings",
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' advice and progress bars off the terminal inside the context."""
    from transformers.utils import logging

    level, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def auto_classes(name: str) -> Iterator[tuple[Any, Any]]:
    """Yield AutoConfig and AutoModelForCausalLM, quiet, and turn their errors (of many types) into BadManifest. Raises OperatorError."""
    need_extra("text")
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet_transformers():
        try:
            yield AutoConfig, AutoModelForCausalLM
        except OperatorError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()).rpartition("ValueError: ")[2]  # without the names of transformers' own checks
            raise BadManifest(f"the model {name} cannot be built: {reason}", hint="correct [model] in the manifest") from error


def pretrained(auto_model: Any, source: str, revision: str | None = None, config: PreTrainedConfig | None = None) -> Any:
    """Build a model with existing weights, in float32, from a folder or a name on the hub. Call inside `auto_classes`."""
    model, report = auto_model.from_pretrained(
        source,
        config=config,
        revision=revision,
        attn_implementation="sdpa",
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=False,
        use_safetensors=True,  # never a pickle
    )
    if report["missing_keys"]:
        raise BadManifest(
            f"{source} lacks weights of a language model: {', '.join(sorted(report['missing_keys'])[:3])}",
            hint="choose one with a causal language model",
        )
    return model


def _need_known(trouble: str, name: str, known: Iterable[str], otherwise: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, list(known), n=1)
        raise BadManifest(f"{trouble} {name!r}", hint=f"did you mean {near[0]!r}?" if near else otherwise)


def _name(section: ModelSection) -> str:
    return section.architecture if section.hub is None else section.hub
