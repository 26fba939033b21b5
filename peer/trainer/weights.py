"""The tensors that peers average, as meetings, adoption and checkpoints use them: by fragment, and whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from gossamer.optim.fragments import Fragment, add, gather, scatter
from gossamer.peer.trainer.interrupts import uninterrupted


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
