"""The channel between the ranks of one program (torch.distributed): calls of all, orders of rank 0, and tensors.

Small messages travel over a gloo group of their own, for which no GPU waits; weights travel over the backend of their device. Nothing is
pickled: whoever could connect to a rank could run code in it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.protocol.errors import GossamerError

FIRST: Final = 0
LONGEST: Final = timedelta(days=365)  # a pause may be long; the end of a rank's process ends the wait for it at once


class RankGone(GossamerError):
    """Another rank of this program has ended, or has left the run by itself."""


class Call(IntEnum):
    """A method that all ranks call together."""

    WAIT = 0
    STEP = 1
    LOAD_STATE_DICT = 2
    FINISH = 3
    SAVE = 4
    STATE_DICT = 5


@dataclass(frozen=True, slots=True)
class Called:
    """The call that one rank makes."""

    call: Call
    tokens: int  # of its step; -1 where the program gave no count
    is_leaving: bool


@dataclass(frozen=True, slots=True)
class News:
    """The state of the peer at the end of a call: rank 0 sends it, and all ranks use it until the next call ends."""

    has_failed: bool  # the error follows
    is_closed: bool
    is_over: bool
    global_step: int
    since_join: int


@dataclass(frozen=True, slots=True)
class Order:
    """An order of rank 0 to the other ranks within a call: the name of a method of RankProgram, and its arguments."""

    name: str
    arguments: Sequence[Any]


class Ranks:
    """The channel. Every rank calls the same methods in the same order, but those that say otherwise. They raise RankGone."""

    def __init__(self) -> None:
        self.number = dist.get_rank()
        self.count = dist.get_world_size()
        with _watching():
            self._group = dist.new_group(backend="gloo", timeout=LONGEST)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.number == FIRST

    def call(self, called: Called) -> list[Called]:
        """Tell rank 0 what this rank calls; return there what each rank does."""
        row = torch.tensor([called.call, called.tokens, called.is_leaving], device="cpu")
        rows = [torch.empty_like(row) for _ in range(self.count)] if self.is_first else None
        with _watching():
            dist.gather(row, rows, FIRST, self._group)
        return [Called(Call(call), tokens, bool(is_leaving)) for call, tokens, is_leaving in (row.tolist() for row in rows or ())]

    def order(self, name: str, *arguments: object) -> None:
        """On rank 0: have the others do the same; arguments fit into JSON. Elsewhere nothing: the order has come."""
        if self.is_first and self.count > 1:
            text = json.dumps([name, arguments]).encode()
            self.broadcast(torch.tensor([len(text), *([0] * len(News.__slots__))], device="cpu"))
            self.broadcast(_as_tensor(text))

    def end(self, news: News) -> None:
        """End a call, on rank 0 alone."""
        self.broadcast(torch.tensor([0, *map(int, astuple(news))], device="cpu"))

    def next(self) -> Order | News:
        """Wait for what rank 0 sends next, on another rank."""
        numbers = torch.empty(1 + len(News.__slots__), dtype=torch.int64, device="cpu")
        self.broadcast(numbers)
        num_bytes, failed, closed, over, global_step, since_join = numbers.tolist()
        if not num_bytes:
            return News(bool(failed), bool(closed), bool(over), global_step, since_join)
        text = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.broadcast(text)
        return Order(*json.loads(_as_text(text)))

    def collect(self, text: str) -> list[str]:
        """Send rank 0 a text; return there those of all ranks, else nothing."""
        if self.is_first:
            return [text, *(self._receive_text(number) for number in range(1, self.count))]
        own = _as_tensor(text.encode())
        self.send(torch.tensor([len(own)], device="cpu"), FIRST)
        if len(own):
            self.send(own, FIRST)
        return []

    def share(self, text: str = "") -> str:
        """Return the text of rank 0, not an empty one, on all ranks."""
        own = _as_tensor(text.encode())
        num_bytes = torch.tensor([len(own)], device="cpu")
        self.broadcast(num_bytes)
        shared = own if self.is_first else torch.empty(int(num_bytes), dtype=torch.uint8, device="cpu")
        self.broadcast(shared)
        return _as_text(shared)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor by that of rank 0, in place."""
        with _watching():
            dist.broadcast(tensor, FIRST, self._over(tensor))

    def send(self, tensor: Tensor, receiver: int) -> None:
        """Send another rank, which calls `receive`, the values of a tensor of any type."""
        values = bytes_of(tensor)
        with _watching():
            dist.send(values, receiver, self._over(values))

    def receive(self, tensor: Tensor, sender: int) -> Tensor:
        """Overwrite a contiguous tensor by that of another rank, which calls `send`, and return it."""
        values = bytes_of(tensor)
        with _watching():
            dist.recv(values, sender, self._over(values))
        return tensor

    def close(self) -> None:
        """Close the channel: who waits at its other ends raises RankGone. Call it once."""
        group = self._group
        del self._group  # which holds the connections open, too
        dist.destroy_process_group(group)

    def _receive_text(self, sender: int) -> str:
        num_bytes = int(self.receive(torch.empty(1, dtype=torch.int64, device="cpu"), sender))
        return _as_text(self.receive(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"), sender)) if num_bytes else ""

    def _over(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._group if tensor.device.type == "cpu" else None


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as uint8[bytes]: a view, or a copy of one that is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8, device="cpu")


def _as_text(values: Tensor) -> str:
    return values.numpy().tobytes().decode()


@contextlib.contextmanager
def _watching() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = f"another rank of this program has ended, or has left the run by itself ({error})"
        raise RankGone(reason, hint="see what that rank has printed; then start all ranks again") from error
