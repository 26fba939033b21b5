"""Error feedback: what a packing lost of one pseudo-gradient is added to the next.

a = decay * e + x; send Q(a); e = a - Q(a) (SparseLoCo, arXiv 2508.15706; classic error feedback at decay 1). For pseudo-gradients of
group methods only: the message of a pair needs none (docs/concepts/mathematics.md). A new or returning peer starts from zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim.codecs.interface import Packing


class Feedback:
    """One tensor's residual around a packing. Not thread safe; owns its residual."""

    def __init__(self, packing: Packing, decay: float, num_values: int, device: torch.device | str = "cpu") -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"The decay of error feedback must lie in [0, 1], and is {decay}.")
        self._packing = packing
        self._decay = decay
        self._residual = torch.zeros(num_values, dtype=torch.float32, device=device)

    @property
    def residual(self) -> Tensor:
        """Return what is still owed: f32[num_values], not a copy."""
        return self._residual

    def pack(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the payload for `values` plus what is owed, and what everybody decodes from it; keep the rest.

        Every peer, the sender included, must count the decoded tensor, not `values`.
        """
        wanted = self._residual.mul_(self._decay).add_(values)
        payload = self._packing.pack(wanted)
        decoded = self._packing.unpack(payload, values.numel())
        self._residual = wanted - decoded
        return payload, decoded
