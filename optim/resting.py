"""The inner optimizer with its state by name: on the parameters' device, or resting on the host between steps.

A state that rests comes to the device in parts, each of which takes its step and goes back. So the device holds one part at a time, and a
step copies the state twice. The parts keep the stacks in which Muon orthogonalizes matrices, so the steps are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from gossamer.optim.inner import InnerSettings, build_optimizer, orthogonal_stacks, set_learning_rate

PART_VALUES: Final = 1 << 25  # of parameters that step together; a stack of matrices may be twice as large (optim/inner.py)

Named = Mapping[str, Tensor]


class DeviceOptimizer:
    """An inner optimizer whose state lies beside the parameters. Belongs to one thread."""

    def __init__(self, name: str, parameters: Named, settings: InnerSettings) -> None:
        self._parameters = parameters
        self._optimizer = build_optimizer(name, parameters.items(), settings)

    def step(self, rate: float) -> None:
        """Take one step with the parameters' gradients."""
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()

    def clear_gradients(self) -> None:
        """Free the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return the live tensors of the state, by `KEY/PARAMETER`."""
        kept = self._optimizer.state
        return {f"{key}/{name}": value for name, parameter in self._parameters.items() for key, value in kept.get(parameter, {}).items()}

    def restore(self, state: Named) -> None:
        """Copy what `state` returned; torch places each value on its device."""
        states = {name: {key: value.clone() for key, value in kept.items()} for name, kept in by_parameter(state).items()}
        names = {parameter: name for name, parameter in self._parameters.items()}
        order = [names[parameter] for group in self._optimizer.param_groups for parameter in group["params"]]
        numbered = {number: states[name] for number, name in enumerate(order) if name in states}
        self._optimizer.load_state_dict({"state": numbered, "param_groups": self._optimizer.state_dict()["param_groups"]})

    def forget(self) -> None:
        """Clear the state."""
        self._optimizer.state.clear()


class HostOptimizer:
    """An inner optimizer whose state rests in pinned memory of the host. Belongs to one thread; does as DeviceOptimizer.

    The copies are ordered by the stream on which `step` is called: `state` waits for them.
    """

    def __init__(self, name: str, parameters: Named, settings: InnerSettings) -> None:
        self._parameters = parameters
        self._parts = [_Part(name, pieces, settings) for pieces in _pieces(name, parameters)]
        self._resting: dict[str, dict[str, Tensor]] = {}  # by parameter and key, without the counts of steps, which each piece has

    def step(self, rate: float) -> None:
        """Take one step with the parameters' gradients, a part after the other."""
        for part in self._parts:
            part.step(rate, self._resting)

    def clear_gradients(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return the live tensors of the state, on the host, by `KEY/PARAMETER`."""
        for device in {parameter.device for parameter in self._parameters.values()} - {torch.device("cpu")}:
            torch.accelerator.current_stream(device).record_event().synchronize()
        by_name: dict[str, dict[str, Tensor]] = {}
        for piece in self._all_pieces():
            by_name.setdefault(piece.name, {**piece.state, **self._resting.get(piece.name, {})})
        return {f"{key}/{name}": by_name[name][key] for name in self._parameters for key in by_name.get(name, {})}

    def restore(self, state: Named) -> None:
        """Copy what `state` returned."""
        self.forget()
        kept = by_parameter(state)
        for piece in self._all_pieces():
            for key, value in kept.get(piece.name, {}).items():
                piece.place(key, value, self._resting).copy_(piece.of(value))

    def forget(self) -> None:
        """Clear the state."""
        self._resting.clear()
        for piece in self._all_pieces():
            piece.state.clear()

    def _all_pieces(self) -> Iterator[_Piece]:
        return (piece for part in self._parts for piece in part.pieces)


def by_parameter(state: Named) -> dict[str, dict[str, Tensor]]:
    """Sort a state by `KEY/PARAMETER` into one by parameter and key."""
    sorted_state: dict[str, dict[str, Tensor]] = {}
    for full, value in state.items():
        key, name = full.split("/", 1)
        sorted_state.setdefault(name, {})[key] = value
    return sorted_state


def most_values_at_once(name: str, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> int:
    """Return how many parameter values a HostOptimizer of that name steps at once, at most, for parameters of these shapes."""
    parts = _pieces(name, {key: torch.empty(shape, device="meta", requires_grad=True) for key, shape in shapes.items()}, device)
    return max((sum(piece.view.numel() for piece in pieces) for pieces in parts), default=0)


@dataclass(slots=True)
class _Piece:
    """A parameter, or some of its rows."""

    name: str
    parameter: Tensor
    rows: slice | None
    view: Tensor  # what the optimizer of its part steps: the parameter itself where it is whole
    state: dict[str, Tensor] = field(default_factory=dict)  # on the host: parts of the parameter's resting tensors, and a count of steps

    def bring(self, step_device: torch.device) -> dict[str, Tensor]:
        """Return the state on the device, and let `view` see the parameter's values and gradient, whose memory may have changed."""
        if self.rows is not None:
            self.view.data = self.parameter.data[self.rows]
            self.view.grad = None if self.parameter.grad is None else self.parameter.grad[self.rows]
        devices = {True: self.parameter.device, False: step_device}
        return {key: value.to(devices[value.dim() > 0], non_blocking=True, copy=True) for key, value in self.state.items()}

    def put_back(self, state: Named, resting: dict[str, dict[str, Tensor]]) -> None:
        """Copy the state to the host, and let go of the gradient."""
        for key, value in state.items():
            self.place(key, value, resting).copy_(value, non_blocking=True)
        if self.rows is not None:
            self.view.grad = None

    def place(self, key: str, like: Tensor, resting: dict[str, dict[str, Tensor]]) -> Tensor:
        """Return where a value of the state rests; make the place if it lacks."""
        if key not in self.state:
            is_pinned, whole = self.parameter.device.type != "cpu", self.parameter.shape if like.dim() else like.shape
            kept = {} if not like.dim() else resting.setdefault(self.name, {})
            if key not in kept:
                kept[key] = torch.empty(whole, dtype=like.dtype, pin_memory=is_pinned)
            self.state[key] = self.of(kept[key])
        return self.state[key]

    def of(self, whole: Tensor) -> Tensor:
        """Return this piece's part of a tensor of the parameter's shape; a count of steps is whole."""
        return whole if self.rows is None or not whole.dim() else whole[self.rows]


class _Part:
    """Pieces that step together, and their optimizer, whose state is empty between steps."""

    def __init__(self, name: str, pieces: list[_Piece], settings: InnerSettings) -> None:
        self.pieces = pieces
        self._optimizer = build_optimizer(name, [(piece.name, piece.view) for piece in pieces], settings)
        is_fused = any(group.get("fused") for group in self._optimizer.param_groups)
        self._step_device = pieces[0].parameter.device if is_fused else torch.device("cpu")  # where torch wants the count of steps

    def step(self, rate: float, resting: dict[str, dict[str, Tensor]]) -> None:
        """Bring the state, step, and put it back; `resting` gets the tensors that lack."""
        states = self._optimizer.state
        for piece in self.pieces:
            states[piece.view] = piece.bring(self._step_device)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        for piece in self.pieces:
            piece.put_back(states[piece.view], resting)
        states.clear()


def _pieces(name: str, parameters: Named, device: torch.device | None = None) -> Iterator[list[_Piece]]:
    """Yield the pieces of each part: Muon's stacks of matrices, then everything else in parts of PART_VALUES."""
    trained = {key: parameter for key, parameter in parameters.items() if parameter.requires_grad}
    stacks = list(orthogonal_stacks(name, trained, device))
    for stack in stacks:
        yield [_Piece(key, trained[key], None, trained[key]) for key in stack]
    stacked = {key for stack in stacks for key in stack}
    part, num_values = list[_Piece](), 0
    for key in (key for key in trained if key not in stacked):
        for piece in _cut(key, trained[key]):
            if part and num_values + piece.view.numel() > PART_VALUES:
                yield part
                part, num_values = [], 0
            part.append(piece)
            num_values += piece.view.numel()
    if part:
        yield part


def _cut(name: str, parameter: Tensor) -> Iterator[_Piece]:
    """Yield a parameter whole, or in runs of rows of at most PART_VALUES."""
    if parameter.numel() <= PART_VALUES or not parameter.dim():
        yield _Piece(name, parameter, None, parameter)
        return
    num_rows = max(1, PART_VALUES * len(parameter) // parameter.numel())
    for first in range(0, len(parameter), num_rows):
        rows = slice(first, min(first + num_rows, len(parameter)))
        yield _Piece(name, parameter, rows, parameter.detach()[rows].requires_grad_())
