"""A program's first weights: the run's, unless those stay worse than what its user has given it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer.module_program import ModuleProgram
from gossamer.peer.link import messages
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.model.trainable import shapes_of
from gossamer.peer.trainer.replica import Replica
from gossamer.peer.trainer.shared_state import adopt, write_state
from gossamer.run import Run


def replica(weight: float) -> Replica:
    """A program whose loss is the distance of its weights from 1."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(weight)
    program = ModuleProgram(model, [], lambda: (model.weight - 1.0).abs().mean(), {})
    return Replica(Run("first", 1000).manifest(shapes_of(program.parameters)), program, 0)


@pytest.mark.parametrize("may_begin", [False, True])
def test_better_weights_than_the_runs_stay_and_begin_at_the_runs_step_if_they_may(tmp_path: Path, may_begin: bool) -> None:
    host, joiner = replica(3.0), replica(1.5)
    write_state(host, PayloadFolder(tmp_path), "state")
    reply = adopt(joiner, messages.Adopt(str(tmp_path / "state"), 400, may_begin=may_begin), lambda: None)
    assert reply.accepted is may_begin and "held-out loss is 2.0000, that of our own weights 0.5000" in reply.reason
    assert all(bool((tensor == 1.5).all()) for tensor in joiner.parameters.values())
    assert joiner.global_step == (400 if may_begin else 0)
    assert joiner.steps_since_join() == 0, "the warm-up begins"


def test_worse_weights_than_the_runs_are_replaced(tmp_path: Path) -> None:
    host, joiner = replica(1.5), replica(3.0)
    write_state(host, PayloadFolder(tmp_path), "state")
    reply = adopt(joiner, messages.Adopt(str(tmp_path / "state"), 400, may_begin=True), lambda: None)
    assert (reply.accepted, reply.reason) == (True, "")
    assert all(bool((tensor == 1.5).all()) for tensor in joiner.parameters.values())
