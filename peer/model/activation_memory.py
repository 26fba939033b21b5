"""What the backward pass of a model, or of one stage of it, needs beside the weights: counted on fake tensors, so nothing is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gossamer.peer.model.computing import MAX_LOGITS, blocks, next_token_loss, recompute_blocks
from gossamer.peer.model.model import hollow_model, unset_model
from gossamer.protocol.run.sections import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from gossamer.peer.model.stages import Cut

VALUE_BYTES: Final = 4  # f32: logits, and the hidden states between blocks


def activation_bytes(
    section: ModelSection,
    num_sequences: int,
    sequence_length: int,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    cut: Cut | None = None,
) -> int:
    """Return the bytes that the backward pass of `num_sequences` needs beside the weights, of one stage if there is a cut.

    They are the tensors that the forward pass keeps, plus three times the largest of them: gradients are as large as their tensors, and
    those of the logits exist while everything is still kept. 0 for a model whose code depends on values. Raises BadManifest.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    hollow = hollow_model(section) if section.has_adapter else None
    with FakeTensorMode():
        model = unset_model(section, torch.device("cpu")) if hollow is None else _on_cpu(hollow)  # peft cannot add an adapter here
        config: PreTrainedConfig = model.config
        model = model if cut is None else _stage(model, cut)
        tokens = torch.zeros((num_sequences, sequence_length + 1), dtype=torch.int64)
        try:
            kept = _kept_bytes(model, tokens, dtype, cut)
            if recompute and recompute_blocks(model):
                outside, num_blocks = _kept_bytes(model, tokens, dtype, cut), len(blocks(model)) if cut is None else len(cut.span)
                kept = outside + num_blocks * _hidden_bytes(config, tokens) + (kept - outside) // num_blocks
        except DataDependentOutputException:
            return 0
    num_logits: int = tokens[:, 1:].numel() * config.get_text_config().vocab_size if cut is None or cut.is_last else 0
    ends = 0 if cut is None else 2 * _hidden_bytes(config, tokens)  # what comes from the neighbours and goes to them
    return kept + ends + (_hidden_bytes(config, tokens) if num_logits > MAX_LOGITS else 0) + 3 * VALUE_BYTES * min(num_logits, MAX_LOGITS)


def _stage(model: PreTrainedModel, cut: Cut) -> PreTrainedModel:
    from gossamer.peer.model.stages import keep_stage  # of staged runs only

    return keep_stage(model, cut)


def _on_cpu(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model on the meta device tensors on the CPU, tied ones once; returns the model."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                made[parameter] = torch.nn.Parameter(torch.empty(parameter.shape), parameter.requires_grad)
            setattr(module, name, made[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    return model


def _kept_bytes(model: PreTrainedModel, tokens: Tensor, dtype: torch.dtype, cut: Cut | None) -> int:
    """Return the bytes that the forward pass keeps beside the weights; with recomputed blocks, only those kept outside them."""
    kept: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no two get the same key

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    hidden = None
    if cut is not None and not cut.is_first:
        hidden = torch.zeros((*tokens[:, 1:].shape, int(model.config.get_text_config().hidden_size)), requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if cut is None or cut.is_last:
            next_token_loss(model, tokens, dtype, hidden)
        else:
            from gossamer.peer.model.stages import stage_output  # of staged runs only

            stage_output(model, tokens, hidden, dtype)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    return sum(storage.nbytes() for name, storage in kept.items() if name not in weights)


def _hidden_bytes(config: PreTrainedConfig, tokens: Tensor) -> int:
    return VALUE_BYTES * tokens[:, 1:].numel() * int(config.get_text_config().hidden_size)
