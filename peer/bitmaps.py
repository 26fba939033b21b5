"""The list of blocks that did not decode, as it travels: hex of one bit per block, lowest bit first; empty when none failed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def pack(failed: Tensor) -> str:
    """Write bool[num_blocks] as hex, padded with zeros to whole bytes."""
    if not bool(failed.any()):
        return ""
    bits = functional.pad(failed.to(torch.uint8), (0, -failed.numel() % 8)).view(-1, 8)
    return bytes((bits << _places(failed.device)).sum(1).tolist()).hex()


def unpack(text: str, num_blocks: int, device: torch.device) -> Tensor:
    """Read bool[num_blocks] back. Raises ValueError for a list of another number of blocks."""
    packed = bytes.fromhex(text)
    if packed and len(packed) != -(-num_blocks // 8):
        raise ValueError(f"A list of failed blocks of {len(packed)} bytes does not fit {num_blocks} blocks.")
    if not packed:
        return torch.zeros(num_blocks, dtype=torch.bool, device=device)
    bits = (torch.tensor(list(packed), dtype=torch.uint8, device=device).unsqueeze(1) >> _places(device)) & 1
    return bits.flatten()[:num_blocks].bool()


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
