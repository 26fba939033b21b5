"""Inner optimizers by the name in the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from optim.inner import InnerSettings, build_adamw
from optim.muon import build_muon
from optim.names import nearest

Build = Callable[[Iterable[tuple[str, Tensor]], InnerSettings], torch.optim.Optimizer]

OPTIMIZERS: Mapping[str, Build] = {"adamw": build_adamw, "muon": build_muon}


def build_optimizer(name: str, parameters: Iterable[tuple[str, Tensor]], settings: InnerSettings) -> torch.optim.Optimizer:
    """Build the inner optimizer of that name. Raises ValueError that names the nearest ones."""
    if name not in OPTIMIZERS:
        raise ValueError(f"There is no inner optimizer named {name!r}. Did you mean {nearest(name, OPTIMIZERS)}?")
    return OPTIMIZERS[name](parameters, settings)
