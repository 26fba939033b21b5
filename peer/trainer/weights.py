"""The tensors that peers average, as meetings, adoption and checkpoints use them: by fragment, and whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType

import torch
from torch import Tensor

from gossamer.optim.fragments import Fragment, add, gather, scatter


class Weights:
    """The tensors of a program that travel, f32, by name: its own, written to between two steps. Belongs to the trainer's thread."""

    is_sharded = False  # over ranks, which all take part: then only at a step boundary, on the trainer's thread

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._remembered: dict[str, Tensor] = {}

    def gather(self, fragment: Fragment) -> Tensor:
        """Return a fragment's values: a new f32[numel] on their device."""
        return gather(fragment, self.tensors)

    def scatter(self, fragment: Fragment, flat: Tensor) -> None:
        """Overwrite a fragment's values by f32[numel] of any device."""
        scatter(fragment, flat, self.tensors)

    def add(self, fragment: Fragment, flat: Tensor) -> None:
        """Add f32[numel] on their device to a fragment's values."""
        add(fragment, flat, self.tensors)

    @contextlib.contextmanager
    def remembered(self, names: Collection[str] | None = None) -> Iterator[Callable[[], None]]:
        """Copy the values of these tensors, by default of all; yield what puts them back. One at a time."""
        self.remember(names)
        try:
            yield self.put_back
        finally:
            self.forget()

    def values(self) -> dict[str, Tensor]:
        """Return whole tensors by name: the live ones, or copies on the host if they are sharded."""
        return {name: tensor.detach() for name, tensor in self.tensors.items()}

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite all tensors by whole ones of any device. Raises KeyError for a missing one."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(values[name])

    def remember(self, names: Collection[str] | None) -> None:
        """Copy the values of these tensors. `remembered` calls it, like the next two."""
        self._remembered = {name: part.detach().clone() for name, part in self._parts(names).items()}

    def put_back(self) -> None:
        """Put the values back."""
        with uninterrupted(), torch.no_grad():
            for name, part in self._parts(self._remembered).items():
                part.copy_(self._remembered[name])

    def forget(self) -> None:
        """Free the copies."""
        self._remembered = {}

    def _parts(self, names: Collection[str] | None) -> Mapping[str, Tensor]:
        """Return the part of each of these tensors that this process holds, by default of all: views."""
        return self.tensors if names is None else {name: self.tensors[name] for name in names}


@contextlib.contextmanager
def uninterrupted(*, unless: bool = False) -> Iterator[None]:
    """Let Ctrl-C wait for the end of the context, which is short; `unless`: it is not. On any thread: Ctrl-C reaches the main one alone."""
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if unless or not callable(handler):  # by default, SIGINT is default_int_handler; others end the process, or do nothing
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
