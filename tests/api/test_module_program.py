"""A user's model as a program: how it is evaluated, probed, checkpointed, and what it may not be."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.module_program import EvaluateProbe, Evaluation, ModuleProgram, fenced
from gossamer.optim.fragments import STATISTICS, split
from gossamer.peer.trainer.losses import Losses, MeasureFailed
from gossamer.peer.trainer.probe import ProbeGate, Shifts
from gossamer.peer.trainer.weights import Weights
from gossamer.protocol.errors import BadSettings

CPU = torch.device("cpu")


class Net(nn.Module):
    """With dropout, a batch norm, and a part that stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.frozen = nn.BatchNorm1d(1)
        self.frozen.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.body(x))


def evaluation(model: nn.Module, measure: Callable[[], Any]) -> Evaluation:
    return Evaluation(measure, model, CPU)


def test_evaluate_runs_without_dropout_and_gradients_and_leaves_modes_and_generators() -> None:
    model, x = Net(), torch.randn(4, 6)
    modes = [module.training for module in model.modules()]

    def measure() -> Tensor:
        assert not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
        return model(x).square().flatten() + torch.rand(4) + random.random() + np.random.random()

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = np.random.RandomState(5).random()
    states = torch.get_rng_state(), random.getstate()
    first, second = evaluation(model, measure)(), evaluation(model, measure)()
    assert first == second and len(first.values) == 4
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1] and np.random.random() == expected
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("value", "losses"), [(1.5, (1.5,)), (torch.tensor(2.0), (2.0,)), ([1, -2.5], (1.0, -2.5)), (np.ones(2), (1.0, 1.0))]
)
def test_evaluate_returns_a_number_or_several(value: Any, losses: tuple[float, ...]) -> None:
    assert evaluation(Net(), lambda: value)() == Losses(losses)


def failing() -> float:
    raise ZeroDivisionError("no data")


@pytest.mark.parametrize("measure", [failing, lambda: None, lambda: "loss", list])
def test_an_evaluate_that_fails_is_said_and_leaves_the_model_in_its_mode(measure: Callable[[], Any]) -> None:
    model = Net()
    with pytest.raises(MeasureFailed, match=r"evaluate\(\) raised"):
        evaluation(model, measure)()
    assert model.training and not model.frozen.training


def test_an_evaluate_of_other_data_at_each_call_is_refused() -> None:
    numbers = iter([1.0, 1.2])
    with pytest.raises(BadSettings, match="1 and then 1.2 for the same weights") as caught:
        evaluation(Net(), lambda: next(numbers)).need_steady()
    assert "same held-out data" in caught.value.hint
    assert evaluation(Net(), lambda: math.nan).need_steady().mean != 0.0


def program(model: nn.Module, **kept: Any) -> tuple[ModuleProgram, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return ModuleProgram(model, [optimizer], lambda: model(torch.ones(2, 6)).mean(), kept), optimizer


def test_a_checkpoint_brings_optimizer_and_kept_objects_back() -> None:
    model = Net()
    own, optimizer = program(model, average=nn.Linear(2, 2))
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    tensors = {name: tensor.clone() for name, tensor in own.kept().tensors.items()}
    state = json.loads(json.dumps(own.kept().state))
    fresh, other = program(Net(), average=nn.Linear(2, 2))
    fresh.restore(tensors, state)
    assert fresh.kept().tensors.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in fresh.kept().tensors.items())
    own.forget_optimizer()
    assert not optimizer.state and other.state


def test_a_checkpoint_asks_each_object_for_its_state_once() -> None:
    class Average(nn.Linear):
        num_asked = 0

        def state_dict(self, *arguments: Any, **named: Any) -> Any:
            self.num_asked += 1
            return super().state_dict(*arguments, **named)

    average = Average(2, 2)
    own, _ = program(Net(), average=average)
    assert any(name.startswith("program/state/average") for name in own.kept().tensors) and average.num_asked == 1


@pytest.mark.parametrize("given", [{"a": "an optimizer"}, [nn.Linear(1, 1)], nn.Linear(1, 1).parameters()])
def test_what_is_no_optimizer_is_refused_before_a_peer_starts(given: Any, tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="is no optimizer") as caught:
        gossamer.host(gossamer.Run("a", 3), Net(), given, evaluate=None, home=tmp_path / "home")
    assert "torch.optim" in caught.value.hint and not (tmp_path / "home").exists()


def test_a_checkpoint_of_another_program_is_refused() -> None:
    own, _ = program(Net())
    other, _ = program(Net(), loader=nn.Linear(1, 1))
    with pytest.raises(KeyError, match="it has no state/loader"):
        other.restore(own.kept().tensors, own.kept().state)


def test_statistics_are_in_fragments_of_their_own() -> None:
    own, _ = program(Net())
    fragments = split({name: tuple(tensor.shape) for name, tensor in own.parameters.items()}, 1 << 20)
    names = [{piece.name for piece in fragment.pieces} for fragment in fragments]
    assert names[-1] == {name for name in own.parameters if name.startswith(STATISTICS)} and len(names[-1]) == 4
    assert [fragment.holds_statistics for fragment in fragments] == [False, True] and fragments[-1].num_coded == 0


def test_a_probe_sees_which_merge_harms_and_leaves_the_weights() -> None:
    weight = torch.zeros(8)
    target = torch.linspace(0.5, 1.0, 8)
    measured = Evaluation(lambda: (weight - target).square(), {"w": weight}, CPU)
    (fragment,) = split({"w": (8,)}, 100)
    probe, gate = EvaluateProbe(measured, Weights({"w": weight})), ProbeGate()
    towards, away = 0.5 * target, -2.0 * target
    for pair, is_harmful in ((towards, False), (away, True)):
        judgement = probe.judge(gate, fragment, Shifts(pair, 0.1 * target, 0.1 * target), 0.5, is_behind=False)
        assert bool(judgement.reason) == is_harmful
    assert torch.equal(weight, torch.zeros(8))


def test_a_probe_needs_as_many_losses_each_time() -> None:
    weight, counts = torch.zeros(8), iter([8, 7])
    measured = Evaluation(lambda: torch.zeros(next(counts)), {"w": weight}, CPU)
    (fragment,) = split({"w": (8,)}, 100)
    probe, shift = EvaluateProbe(measured, Weights({"w": weight})), torch.ones(8)
    with pytest.raises(MeasureFailed, match="returned 8 losses and then 7"):
        probe.judge(ProbeGate(), fragment, Shifts(shift, shift, shift), 0.5, is_behind=False)
    assert torch.equal(weight, torch.zeros(8))


def test_a_probe_expects_to_cost_three_calls_of_evaluate() -> None:
    weight = torch.zeros(8)
    measured = Evaluation(lambda: weight.sum(), {"w": weight}, CPU)
    measured()
    assert measured.seconds > 0.0
    assert EvaluateProbe(measured, Weights({"w": weight})).expected_s == 3 * measured.seconds


def test_tensors_that_were_replaced_after_joining_are_named() -> None:
    model = Net()
    own, _ = program(model)
    assert own.evaluation() is not None
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(BadSettings, match=r"body\.0\.bias is another tensor") as caught:
        own.evaluation()
    assert "in place" in caught.value.hint


def test_a_model_that_is_frozen_for_a_part_of_each_step_travels_on() -> None:
    model = Net()
    model.frozen.requires_grad_(False)
    own, _ = program(model)
    model.body.requires_grad_(False)  # as the discriminator, while the generator steps
    model.frozen.weight.requires_grad_(False)
    assert own.evaluation() is not None
    model.frozen.requires_grad_(True)
    own._next_report_s = 0.0
    with pytest.raises(BadSettings, match=r"frozen\.bias is another tensor"):
        own.evaluation()


@pytest.mark.parametrize("value", [-math.inf, math.nan, torch.finfo(torch.float32).min])
def test_a_buffer_that_no_meeting_averages_is_named(value: float) -> None:
    model = Net()
    model.body.register_buffer("mask", torch.tensor([0.0, value]))
    with pytest.raises(BadSettings, match=r"buffer body\.mask has values that are not finite") as caught:
        program(model)
    assert "persistent=False" in caught.value.hint
    model.body.register_buffer("mask", torch.tensor([0.0, value]), persistent=False)
    program(model)


def test_reports_wait_where_evaluate_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = program(Net())
    now_s = iter([100.0, 100.0, 101.0, 110.0, 121.5, 121.5, 122.0])
    monkeypatch.setattr("gossamer.module_program.time.monotonic", lambda: next(now_s))
    assert own.evaluation() is not None  # from 100 to 101
    assert own.evaluation() is None  # at 110
    assert own.evaluation() is not None  # at 121.5


def test_the_users_error_is_cut() -> None:
    def measure() -> float:
        raise ValueError("x" * 10_000)

    with pytest.raises(MeasureFailed) as caught:
        evaluation(Net(), measure)()
    assert len(str(caught.value)) < 300


def test_a_fence_calls_before_each_step_and_only_inside() -> None:
    model, calls = Net(), list[int]()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with fenced(optimizers, lambda: calls.append(1)):
        for optimizer in optimizers:
            optimizer.step()
    optimizers[0].step()
    assert len(calls) == 2
