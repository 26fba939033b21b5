from __future__ import annotations

import pytest
import torch

from optim.inner import InnerSettings
from optim.muon import Muon
from optim.optimizers import OPTIMIZERS, build_optimizer

SETTINGS = InnerSettings(total_steps=10)


def test_every_name_builds_an_optimizer_that_steps() -> None:
    for name in OPTIMIZERS:
        layer = torch.nn.Linear(4, 4)
        before = layer.weight.detach().clone()
        optimizer = build_optimizer(name, layer.named_parameters(), SETTINGS)
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert not torch.equal(layer.weight, before)


def test_names_lead_to_their_optimizers() -> None:
    parameters = list(torch.nn.Linear(4, 4).named_parameters())
    assert isinstance(build_optimizer("adamw", parameters, SETTINGS), torch.optim.AdamW)
    assert isinstance(build_optimizer("muon", parameters, SETTINGS), Muon)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="adamw"):
        build_optimizer("adam", [], SETTINGS)
