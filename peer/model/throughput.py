"""Floating point operations of an inner step and the peak rate of a device, from which peers report their MFU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

from gossamer.peer.model.accelerator import product_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Dense bf16 matrix products with sums in f32, FLOP/s, from data sheets; the first key that is part of the device's name applies.
PEAK_BF16_FLOPS: Final[Mapping[str, float]] = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A40": 150e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def flops_per_token(
    config: PreTrainedConfig,
    shapes: Mapping[str, tuple[int, ...]],
    sequence_length: int,
    frozen: Mapping[str, tuple[int, ...]] | None = None,
) -> float:
    """Return the floating point operations of an inner step per token, forward and backward, without recomputation.

    Six for each parameter of a matrix (an embedding without a tied head is only looked up), plus twelve for each layer, hidden unit and
    position of attention, counted without the causal mask: the usual count (PaLM, arXiv 2204.02311, appendix B). Four for a parameter of
    the matrices that are `frozen`, which have no gradient of their own.
    """
    text = config.get_text_config()
    matrices = [math.prod(shape) for shape in shapes.values() if len(shape) >= 2]
    under = [math.prod(shape) for shape in (frozen or {}).values() if len(shape) >= 2]
    looked_up = 0 if getattr(text, "tie_word_embeddings", False) else text.vocab_size * text.hidden_size
    attention = 12 * int(getattr(text, "num_hidden_layers", 0)) * text.hidden_size * sequence_length
    if under:
        return float(6 * sum(matrices) + 4 * (sum(under) - looked_up) + attention)
    return float(6 * (sum(matrices) - looked_up) + attention)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of a device; 0 if unknown."""
    if device.type == "cpu" or dtype is not torch.bfloat16:
        return 0.0
    name = product_name(device)
    return next((flops for key, flops in PEAK_BF16_FLOPS.items() if key in name), 0.0)
