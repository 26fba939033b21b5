"""A program's place in a run, for a framework that drives the loop: what `gossamer.transformers` and `gossamer.lightning` share."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.module_program import Evaluate, Stateful
from gossamer.protocol.errors import BadSettings, OperatorError
from gossamer.run import Run
from gossamer.swarm import Swarm, host, join

SHOW: Final = partial(print, flush=True)


class Place:
    """What a callback does at the begin, at each step and at the end of training. Use it as a context manager, or end it by `_end`."""

    def __init__(
        self,
        run_or_invite: Run | str | None,
        *,
        evaluate: Evaluate | None,
        home: str | os.PathLike[str],
        state: Mapping[str, Stateful] | None = None,
        settings: Mapping[str, object] | None = None,
        rate: Callable[[Swarm], float] | None = None,
        show_invite: Callable[[str], object] = SHOW,
    ) -> None:
        self._run_or_invite = run_or_invite
        self._evaluate = evaluate
        self._home = home
        self._state = state
        self._settings = settings
        self._rate = rate
        self._show_invite = show_invite
        self._swarm: Swarm | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._open = contextlib.ExitStack()  # holds the swarm while this program is a member

    @property
    def swarm(self) -> Swarm:
        """The swarm, from the begin of training on. Raises BadSettings earlier."""
        if self._swarm is None:
            raise BadSettings("training has not begun, so this program is in no swarm yet", hint="use `swarm` in a callback, or afterwards")
        return self._swarm

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.__exit__(kind, error, trace)

    def _begin(self, model: nn.Module, optimizers: Sequence[Optimizer], most_steps: float) -> None:
        """Host or join, and wait until training may begin. `most_steps`: after which the framework ends training."""
        self._end(RuntimeError("training begins again"))
        run = self._run_or_invite
        start = partial(host, run) if isinstance(run, Run) else partial(join, run)
        swarm = start(model, optimizers, evaluate=self._evaluate, home=self._home, state=self._state, settings=self._settings)
        self._swarm, self._optimizers = swarm, optimizers
        self._open.push(swarm)
        try:
            if isinstance(run, Run) and not swarm.is_alone:
                self._show_invite(swarm.invite())
            swarm.wait()
        except BaseException as error:
            self._end(error)
            raise
        self._set_rate()
        if most_steps < (left := swarm.clock.total_steps - swarm.clock.steps):
            warnings.warn(f"the Trainer ends after {most_steps:.0f} steps and leaves a run that lasts {left} more", stacklevel=2)

    def _step(self, tokens: int, loss: float | Tensor | None) -> bool:
        """End a step; return whether training is over. At the run's end, average with the others: the weights are the result then."""
        self.swarm.step(tokens=tokens, loss=loss)
        self._set_rate()
        if is_over := self.swarm.over:
            self._end(None)
        return is_over

    def _end(self, error: BaseException | None) -> None:
        """Leave the swarm, if this program is in one: after an error, with the last good checkpoint."""
        self._open.__exit__(None if error is None else type(error), error, None)

    def _set_rate(self) -> None:
        if self._rate is not None:
            rate = self._rate(self.swarm)
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate


@contextlib.contextmanager
def needs(packages: str) -> Iterator[None]:
    """Turn a failed import inside into an OperatorError that names the command to install the packages."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise OperatorError(
            f"this callback needs a package that is not installed ({(error.name or '').partition('.')[0]})", hint=f"pip install {packages}"
        ) from error
