"""A program of the library's user, as the boundary sees it: model, optimizers, an `evaluate` function, and what else a checkpoint keeps."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.kept_state import pack, unpack
from gossamer.optim.fragments import STATISTICS, Fragment
from gossamer.peer.model.accelerator import forked_generators
from gossamer.peer.model.trainable import base_digest, frozen_tensors, trainable_tensors
from gossamer.peer.trainer.losses import Losses, MeasureFailed, measured_with
from gossamer.peer.trainer.probe import Gain, Probe
from gossamer.peer.trainer.program import Kept
from gossamer.peer.trainer.weights import Weights
from gossamer.protocol.errors import BadSettings

Evaluate = Callable[[], float | Sequence[float] | Tensor | npt.NDArray[Any]]
Model = nn.Module | Mapping[str, Tensor]

PROBE_SHARE: Final = 0.005  # of the time of training, that judging messages by `evaluate` may take
PROBE_CALLS: Final = 3  # of `evaluate`, that a judgement takes: two to five
REPORT_SHARE: Final = 0.05  # of the time that passes, that evaluations for reports may take
MAX_WORDS: Final = 200  # characters of the user's error
OWN_OPTIMIZERS: Final = "torch.optim."  # the modules of optimizers that call a closure before they move anything
UNSTEADY: Final = 1e-3  # relative difference of two evaluations of the same weights that some devices cannot avoid


class Stateful(Protocol):
    """What a checkpoint can keep beside the weights: a loader, a scheduler, an average of the weights."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore it."""


class Evaluation:
    """Calls the user's `evaluate`: no gradients, no dropout, the same random numbers each time, and generators as they were."""

    def __init__(self, evaluate: Evaluate, model: Model, device: torch.device) -> None:
        self._evaluate = evaluate
        self._modules = list(model.modules()) if isinstance(model, nn.Module) else []
        self._device = device
        self.seconds = 0.0  # that the last call took

    def __call__(self) -> Losses:
        """Measure the weights. Raises MeasureFailed where `evaluate` raises or returns no numbers."""
        modes = [module.training for module in self._modules]
        began_s = time.monotonic()
        try:
            with torch.no_grad(), same_draws(self._device):
                for module in self._modules:
                    module.training = False
                return _losses_of(self._evaluate())
        except (Exception, SystemExit) as error:
            words = str(error)[:MAX_WORDS]
            raise MeasureFailed(f"evaluate() raised {type(error).__name__}: {words}", hint="see the traceback in your program") from error
        finally:
            self.seconds = time.monotonic() - began_s
            for module, was_training in zip(self._modules, modes, strict=True):
                module.training = was_training

    def need_steady(self) -> Losses:
        """Measure twice. Raises BadSettings if the losses of the same weights differ, MeasureFailed as a call."""
        first, second = self(), self()
        close = math.isclose(first.mean, second.mean, rel_tol=UNSTEADY, abs_tol=UNSTEADY * UNSTEADY)
        if len(first.values) != len(second.values) or (first.are_finite and not close):
            raise BadSettings(
                f"evaluate() returned {first.mean:.6g} and then {second.mean:.6g} for the same weights",
                hint="measure the same held-out data at each call: other peers' weights are compared by this number",
            )
        return first


def _losses_of(value: object) -> Losses:
    numbers = value.flatten().tolist() if isinstance(value, Tensor | np.ndarray) else value
    values = tuple(map(float, numbers)) if isinstance(numbers, Sequence) else (float(numbers),)  # type: ignore[arg-type]
    if not values:
        raise ValueError("it returned no number")
    return Losses(values)


@contextlib.contextmanager
def same_draws(device: torch.device) -> Iterator[None]:
    """Begin the global generators of torch, numpy and `random` inside as always, and leave them as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with forked_generators(device):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class EvaluateProbe(Probe):
    """Measures merges with `evaluate`, on the live weights: at a step boundary."""

    runs_beside = False
    most_share = PROBE_SHARE

    def __init__(self, measure: Evaluation, weights: Weights) -> None:
        self.expected_s = PROBE_CALLS * measure.seconds
        self._measure = measure
        self._weights = weights
        self._scale = 0.0  # of the losses, lately

    def draw(self) -> Sequence[Tensor]:
        """Return an empty tensor, once: `evaluate` has its own data, always the same."""
        return (torch.empty(0, device="cpu"),)

    def losses(self, fragment: Fragment, shift: Tensor, data: Tensor) -> Tensor:
        """Return the losses with a fragment shifted; the weights are as they were."""
        weights, names = self._weights, [piece.name for piece in fragment.pieces]
        losses = measured_with(lambda: weights.add(fragment, shift), weights, self._measure, names)
        return torch.tensor(losses.values, device="cpu")

    def gain(self, before: Tensor, after: Tensor) -> Gain:
        """Return the gain, measured against the spread of the losses or their mean, whichever is larger or was so lately.

        Raises MeasureFailed where `evaluate` has not returned as many losses for both.
        """
        if before.numel() != after.numel():
            raise MeasureFailed(
                f"evaluate() returned {before.numel()} losses and then {after.numel()}",
                hint="return a loss for each part of the held-out data, and always as many",
            )
        spread = float(before.std()) if before.numel() > 1 else 0.0
        difference = before - after
        noise = float(difference.std()) / math.sqrt(before.numel()) if before.numel() > 1 else 0.0
        self._scale = max(0.99 * self._scale, spread, abs(float(before.mean())))
        return Gain(float(difference.mean()), noise, self._scale, before.numel())


class ModuleProgram:
    """The user's model and all that belongs to it. Its tensors are written to between two steps. Raises BadSettings."""

    def __init__(self, model: Model, optimizers: Sequence[Optimizer], evaluate: Evaluate | None, kept: Mapping[str, Stateful]) -> None:
        self._model = model
        self._next_report_s = 0.0
        self.parameters = trainable_tensors(model)
        devices = sorted({str(tensor.device) for tensor in self.parameters.values()})
        if len(devices) > 1:
            raise BadSettings(f"the model is spread over {' and '.join(devices)}", hint="put all trainable tensors on one device")
        self.device = next(iter(self.parameters.values())).device
        self._need_finite_statistics()
        self.weights = Weights(self.parameters)
        self._evaluation = None if evaluate is None else Evaluation(evaluate, model, self.device)
        self.num_cleared = 0  # how often the optimizers' state was cleared
        for one in optimizers:
            if not isinstance(one, Optimizer):
                raise BadSettings(f"{type(one).__name__} is no optimizer", hint="pass one of torch.optim, a list of several, or None")
        self._optimizers = optimizers
        self._kept: dict[str, Stateful] = {f"optimizer{number}": one for number, one in enumerate(optimizers)}
        self._kept |= {f"state/{name}": one for name, one in kept.items()}

    @functools.cached_property
    def base(self) -> str:
        """The digest of the frozen parameters; empty without any. Takes seconds for a large model, once."""
        return base_digest(self._model)

    def need_steady(self) -> None:
        """Try `evaluate`. Raises BadSettings if it returns other losses for the same weights, or raises."""
        if self._evaluation is not None:
            try:
                self._evaluation.need_steady()
            except MeasureFailed as error:
                raise BadSettings(str(error), hint="evaluate() takes nothing and returns the held-out loss") from error

    def losses(self) -> Losses:
        """Call `evaluate`; without one all weights count as equal."""
        return Losses((0.0,)) if self._evaluation is None else self._evaluation()

    def evaluation(self) -> tuple[float, int] | None:
        """Call `evaluate` for a report, if the last time was not long ago for what it takes.

        Raises BadSettings if the model's tensors are others than those that travel.
        """
        self._need_same_tensors()
        began_s = time.monotonic()
        if self._evaluation is None or began_s < self._next_report_s:
            return None
        losses = self._evaluation()
        self._next_report_s = began_s + self._evaluation.seconds / REPORT_SHARE
        return losses.mean, len(losses.values)

    def outputs(self) -> Tensor | None:
        """Return None: a program's outputs are its own affair."""
        return None

    def new_probe(self, rng: random.Random) -> Probe | None:
        """Return a probe that calls `evaluate`; None without one."""
        return None if self._evaluation is None else EvaluateProbe(self._evaluation, self.weights)

    def kept(self) -> Kept:
        """Return the states of optimizers and of what else is kept: each is asked once."""
        tensors: dict[str, Tensor] = {}
        return Kept(tensors, {"kept": {name: pack(one.state_dict(), f"program/{name}", tensors) for name, one in self._kept.items()}})

    def changes(self, name: str) -> bool:
        """Return True: each may be a live tensor."""
        return True

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore the states. Raises KeyError or ValueError for another program's."""
        for name, one in self._kept.items():
            if name not in state["kept"]:
                raise KeyError(f"it has no {name}; pass the optimizers, and the names in `state`, with which it was written")
            one.load_state_dict(unpack(state["kept"][name], tensors))

    def forget_optimizer(self) -> None:
        """Clear the state of all optimizers."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self.num_cleared += 1

    def cpu_s(self) -> float:
        """Return 0.0: other processes of the program are not known."""
        return 0.0

    def close(self) -> None:
        """Leave all that is the program's as it is."""

    def _need_finite_statistics(self) -> None:
        """Raise BadSettings for a buffer that never averages, and that no state brings to another peer, such as a mask with -inf."""
        for name, tensor in self.parameters.items():
            if name.startswith(STATISTICS) and not bool(tensor.bfloat16().isfinite().all()):
                raise BadSettings(
                    f"the buffer {name.removeprefix(STATISTICS)} has values that are not finite in bf16, so no peer can average it",
                    hint="register it with persistent=False, so that it stays here, or write other values into it",
                )

    def _need_same_tensors(self) -> None:
        trains = trainable_tensors(self._model)
        now = frozen_tensors(self._model) | trains  # programs of several models freeze some of them for a part of the step
        if other := [name for name in trains.keys() | self.parameters.keys() if now.get(name) is not self.parameters.get(name)]:
            raise BadSettings(
                f"{min(other)} is another tensor than when the program joined: what trains now does not travel",
                hint="load weights in place (load_state_dict without assign=True), and unfreeze layers before you join",
            )


@contextlib.contextmanager
def fenced(optimizers: Sequence[Optimizer], before_step: Callable[[], None]) -> Iterator[None]:
    """Call `before_step` before each optimizer moves the weights, inside the context.

    That is before each step, or, where torch's own optimizers are given a closure, after its first call: it holds forward and backward.
    """

    def before(optimizer: Optimizer, given: Sequence[Any], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = named.get("closure", given[1] if len(given) > 1 else None)  # given[0] is the optimizer
        if closure is None or not type(optimizer).__module__.startswith(OWN_OPTIMIZERS):
            before_step()
            return None

        def measured() -> Any:
            loss = closure()
            before_step()
            return loss

        return (given[0],), {**named, "closure": measured}

    handles = [optimizer.register_step_pre_hook(before) for optimizer in optimizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
