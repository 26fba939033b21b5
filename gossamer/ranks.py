"""A program of several ranks (torch.distributed, DDP) as one peer: rank 0 has the node, and the other ranks follow it.

Every rank makes the same calls in the same order. In each, rank 0 learns what all ranks call, acts as a program of one process would, and
sends one small tensor: its clock, whether training is over, and which fragments it has written to. Only these fragments follow. Between two
calls all ranks use what the last one has brought, so that no rank ends its loop, or changes its learning rate, before the others.

The small tensors travel over a gloo group of their own, for which no GPU waits; weights travel over the backend of their device.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from gossamer.module_program import ModuleProgram
from gossamer.optim.fragments import Fragment, gather, scatter
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.own_supervisor import OwnSupervisor
from gossamer.peer.model.plan import fragment_codecs
from gossamer.peer.model.trainable import shapes_of
from gossamer.peer.trainer.boundary import Boundary
from gossamer.protocol.errors import BadSettings, GossamerError, description, from_description
from gossamer.protocol.run.layout import layout_digest
from gossamer.protocol.run.manifest import SignedManifest
from gossamer.swarm import Clock, Swarm

FIRST: Final = 0
NUM_HEAD: Final = 7  # numbers of News before those of the fragments
LONGEST: Final = timedelta(days=365)  # a pause may be long; the end of a rank's process ends the wait for it at once
ON_FIRST: Final = "call it on rank 0: `if torch.distributed.get_rank() == 0: ...`"


class RankGone(GossamerError):
    """Another rank of this program has ended, or has left the run by itself."""


class Call(IntEnum):
    """A method that all ranks call together."""

    WAIT = 0
    STEP = 1
    LOAD_STATE_DICT = 2
    FINISH = 3


@dataclass(frozen=True, slots=True)
class Called:
    """What one rank calls."""

    call: Call
    tokens: int  # of its step
    is_leaving: bool


@dataclass(frozen=True, slots=True)
class News:
    """What rank 0 tells the others at the end of a call, as of which it counts on all ranks."""

    has_failed: bool  # the error follows
    is_closed: bool
    is_over: bool
    is_restored: bool  # the state of the optimizers, and what else is kept, follows
    is_cleared: bool  # the optimizers' state was cleared
    global_step: int
    since_join: int
    moved: tuple[bool, ...]  # the fragments whose fast weights follow

    def to_tensor(self) -> Tensor:
        """Return it as int64[7 + fragments]."""
        head = (self.has_failed, self.is_closed, self.is_over, self.is_restored, self.is_cleared, self.global_step, self.since_join)
        return torch.tensor([*map(int, head), *map(int, self.moved)])

    @classmethod
    def of(cls, numbers: Sequence[int]) -> News:
        """Read what `to_tensor` returned."""
        failed, closed, over, restored, cleared = map(bool, numbers[:5])
        global_step, since_join = numbers[5:NUM_HEAD]
        return cls(failed, closed, over, restored, cleared, global_step, since_join, tuple(map(bool, numbers[NUM_HEAD:])))


class Ranks:
    """The channel between the ranks. Every rank calls the same methods in the same order. They raise RankGone."""

    def __init__(self) -> None:
        self.number = dist.get_rank()
        self._count = dist.get_world_size()
        with _watching():
            self._group = dist.new_group(backend="gloo", timeout=LONGEST)

    def call(self, called: Called) -> list[Called]:
        """Tell rank 0 what this rank calls; return there what each rank does."""
        row = torch.tensor([called.call, called.tokens, called.is_leaving])
        rows = [torch.empty_like(row) for _ in range(self._count)] if self.number == FIRST else None
        with _watching():
            dist.gather(row, rows, FIRST, self._group)
        return [Called(Call(call), tokens, bool(is_leaving)) for call, tokens, is_leaving in (row.tolist() for row in rows or ())]

    def collect(self, text: str) -> list[str]:
        """Send rank 0 a text; return there those of all ranks, else nothing."""
        texts: list[Any] | None = [""] * self._count if self.number == FIRST else None
        with _watching():
            dist.gather_object(text, texts, FIRST, self._group)
        return texts or []

    def share(self, text: str = "") -> str:
        """Return the text of rank 0 on all ranks."""
        box = [text]
        with _watching():
            dist.broadcast_object_list(box, FIRST, self._group)
        return box[0]

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor by that of rank 0, in place."""
        with _watching():
            dist.broadcast(tensor, FIRST, self._group if tensor.device.type == "cpu" else None)

    def close(self) -> None:
        """Close the channel: who waits at its other ends raises RankGone. Call it once."""
        group = self._group
        del self._group  # which holds the connections open, too
        dist.destroy_process_group(group)


@contextlib.contextmanager
def _watching() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = f"another rank of this program has ended, or has left the run by itself ({error})"
        raise RankGone(reason, hint="see what that rank has printed; then start all ranks again") from error


class SharedClock(Clock):
    """The run's clock, as it was on rank 0 in the last call."""

    def __init__(self, total_steps: int) -> None:
        self._steps, self._total_steps, self._since_join = 0, total_steps, 0

    @property
    def steps(self) -> int:
        """As Clock.steps."""
        return self._steps

    @property
    def total_steps(self) -> int:
        """As Clock.total_steps."""
        return self._total_steps

    @property
    def since_join(self) -> int:
        """As Clock.since_join."""
        return self._since_join

    def set(self, news: News) -> None:
        """Set it to what rank 0 has sent."""
        self._steps, self._since_join = news.global_step, news.since_join


class LeadingSwarm(Swarm):
    """Rank 0's place in a run: the peer itself."""

    def __init__(
        self, supervisor: OwnSupervisor, boundary: Boundary, optimizers: Sequence[Optimizer], own: ModuleProgram, ranks: Ranks
    ) -> None:
        super().__init__(supervisor, boundary, optimizers)
        self.clock = self._shared_clock = SharedClock(self._replica.manifest.run.total_steps)
        self._own = own
        self._ranks = ranks
        self._is_deciding = True  # inside a call of all ranks: what happens counts at once
        self._was_over = False  # at the end of the last one
        self._sent = [-1] * len(self._replica.fragments)  # `num_writes` of each fragment, as the others have it
        self._num_cleared = own.num_cleared
        self._is_restored = self._replica.own_steps > 0  # from a checkpoint

    @property
    def over(self) -> bool:
        """As Swarm.over; between two calls, as it was at the end of the last one."""
        return super().over if self._is_deciding else self._was_over

    def wait(self) -> None:
        """As Swarm.wait."""
        with self._together(Call.WAIT):
            super().wait()

    def step(self, *, tokens: int, loss: float | Tensor | None = None) -> None:
        """As Swarm.step."""
        with self._together(Call.STEP, tokens) as total:
            super().step(tokens=total, loss=loss)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As Swarm.load_state_dict."""
        with self._together(Call.LOAD_STATE_DICT):
            super().load_state_dict(state)
            self._is_restored = True

    def finish(self) -> None:
        """As Swarm.finish."""
        self._need_thread()
        if not self._is_closed:
            with self._together(Call.FINISH):
                super().finish()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if (
            isinstance(error, KeyboardInterrupt) and not self._is_closed
        ):  # the others may be at any place: they learn it as the channel closes
            Swarm.finish(self)
        else:
            super().__exit__(kind, error, trace)

    def begin(self) -> None:
        """Send the others the run, and the state with which training begins."""
        home = self._home
        try:
            self._ranks.share(json.dumps({"home": str(home.path), "manifest": home.manifest.read_bytes().hex()}))
            self._share(None)
        except BaseException as error:
            self._close(error)
            raise
        self._is_deciding = False

    @contextlib.contextmanager
    def _together(self, call: Call, tokens: int = 0) -> Iterator[int]:
        """Act for all ranks inside, and send them what comes of it, an error too. Yields the tokens of all ranks."""
        self._need_usable()
        self._is_deciding = True
        try:
            called = self._ranks.call(Called(call, tokens, self._is_leaving.is_set()))
            try:
                _need_alike(called)
                if any(one.is_leaving for one in called):
                    self._is_leaving.set()
                yield sum(one.tokens for one in called)
            except Exception as error:
                self._share(error)
                raise
            self._share(None)
        except BaseException as error:
            if not self._is_closed and (isinstance(error, RankGone) or call in (Call.WAIT, Call.FINISH)):
                self._close(error)
            raise
        finally:
            self._is_deciding = False
            if self._is_closed:
                self._ranks.close()

    def _share(self, error: Exception | None) -> None:
        replica = self._replica
        writes = [fragment.num_writes for fragment in replica.fragments]
        moved = tuple(now != sent for now, sent in zip(writes, self._sent, strict=True))
        is_cleared, is_restored = self._own.num_cleared != self._num_cleared, self._is_restored and error is None
        is_over, steps = self._is_closed or self.over, (replica.global_step, replica.steps_since_join())
        news = News(error is not None, self._is_closed, is_over, is_restored, is_cleared, *steps, moved)
        self._ranks.broadcast(news.to_tensor())
        if error is not None:
            self._ranks.share(_to_text(error))
        with self._boundary.watch.blocked("meetings") if any(moved) else contextlib.nullcontext():
            for fragment, is_moved in zip(replica.fragments, moved, strict=True):
                if is_moved:
                    self._ranks.broadcast(gather(fragment.codec.fragment, replica.parameters))
        if is_restored:
            _send_kept(self._own, self._ranks)
            self._is_restored = False
        self._sent, self._num_cleared, self._was_over = writes, self._own.num_cleared, news.is_over
        self._shared_clock.set(news)

    def _close(self, failure: BaseException | None) -> None:
        super()._close(failure)
        if not self._is_deciding:
            self._ranks.close()


class FollowingSwarm(Swarm):
    """The place of any other rank in a run: it has no node, and does as rank 0 does."""

    def __init__(self, own: ModuleProgram, ranks: Ranks) -> None:
        begun = json.loads(ranks.share())
        if "error" in begun:
            raise from_description(begun)
        manifest = SignedManifest.from_bytes(bytes.fromhex(begun["manifest"])).manifest()
        self.clock = self._shared_clock = SharedClock(manifest.run.total_steps)
        self._folder = Path(begun["home"])
        self._thread = threading.get_ident()
        self._is_leaving = threading.Event()
        self._is_closed = False
        self._rate = 0.0
        self._own = own
        self._ranks = ranks
        self._fragments: list[Fragment] = [codec.fragment for codec in fragment_codecs(manifest, shapes_of(own.parameters))]
        self._is_over = False
        self._on_adopted: Callable[[], None] = lambda: None
        self._follow()

    @property
    def over(self) -> bool:
        """As Swarm.over, at the end of the last call."""
        return self._is_over

    def wait(self) -> None:
        """As Swarm.wait."""
        self._together(Call.WAIT)

    def step(self, *, tokens: int, loss: float | Tensor | None = None) -> None:
        """As Swarm.step; the status shows the loss of rank 0."""
        self._together(Call.STEP, tokens)

    @property
    def status(self) -> dict[str, Any]:
        """As Swarm.status, on the machine of rank 0."""
        return ask(self._folder, {"verb": "status"})

    def invite(self, *, uses: int | None = None) -> str:
        """Raise BadSettings: rank 0 issues invites."""
        raise BadSettings("only rank 0 has the peer's identity, with which it signs invites", hint=ON_FIRST)

    def save(self) -> None:
        """Do nothing: rank 0 writes the checkpoints."""

    def on_adopted(self, call: Callable[[], None]) -> None:
        """As Swarm.on_adopted."""
        self._on_adopted = call

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: rank 0's is that of the peer."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what rank 0 passes."""
        self._together(Call.LOAD_STATE_DICT)

    def finish(self) -> None:
        """As Swarm.finish."""
        self._need_thread()
        if not self._is_closed:
            self._together(Call.FINISH)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif not self._is_closed:
            self._is_closed = True
            self._ranks.close()

    def _together(self, call: Call, tokens: int = 0) -> None:
        self._need_usable()
        self._ranks.call(Called(call, tokens, self._is_leaving.is_set()))
        try:
            self._follow()
        finally:
            if self._is_closed:
                self._ranks.close()

    def _follow(self) -> None:
        """Take over what rank 0 sends. Raises its error."""
        numbers = torch.empty(NUM_HEAD + len(self._fragments), dtype=torch.int64)
        self._ranks.broadcast(numbers)
        news = News.of(numbers.tolist())
        self._is_closed, self._is_over = news.is_closed, news.is_over
        self._shared_clock.set(news)
        failure = json.loads(self._ranks.share()) if news.has_failed else None
        for fragment, is_moved in zip(self._fragments, news.moved, strict=True):
            if is_moved:
                weights = torch.empty(fragment.numel, device=self._own.device)
                self._ranks.broadcast(weights)
                scatter(fragment, weights, self._own.parameters)
        if news.is_restored:
            _take_kept(self._own, self._ranks)
        if news.is_cleared:
            self._own.forget_optimizer()
            self._on_adopted()
        if failure is not None:
            raise from_description(failure)


def started(own: ModuleProgram, optimizers: Sequence[Optimizer], opened: Callable[[], tuple[OwnSupervisor, Boundary]]) -> Swarm:
    """Start this program's peer on rank 0, where `opened` is called, and follow it on the others. Raises its OperatorError on all ranks."""
    ranks = Ranks()
    try:
        layouts = ranks.collect(layout_digest(shapes_of(own.parameters)))
        return _led(own, optimizers, opened, layouts, ranks) if ranks.number == FIRST else FollowingSwarm(own, ranks)
    except BaseException:
        ranks.close()
        raise


def _led(
    own: ModuleProgram,
    optimizers: Sequence[Optimizer],
    opened: Callable[[], tuple[OwnSupervisor, Boundary]],
    layouts: Sequence[str],
    ranks: Ranks,
) -> Swarm:
    try:
        for number, layout in enumerate(layouts):
            if layout != layouts[FIRST]:
                raise BadSettings(f"rank {number} has another model than rank 0", hint="pass the whole model on every rank, as DDP has it")
        supervisor, boundary = opened()
    except Exception as error:
        ranks.share(_to_text(error))
        raise
    swarm = LeadingSwarm(supervisor, boundary, optimizers, own, ranks)
    swarm.begin()
    return swarm


def _need_alike(called: Sequence[Called]) -> None:
    for number, one in enumerate(called):
        if one.call is not called[FIRST].call:
            raise BadSettings(
                f"rank {number} calls {one.call.name.lower()}() while rank 0 calls {called[FIRST].call.name.lower()}()",
                hint="make the same calls on every rank, and as many: `for batch in swarm.batches(loader)` does",
            )
        if one.tokens < 0:
            raise BadSettings(
                f"step(tokens={one.tokens}) on rank {number}", hint="pass the number of examples or tokens of this rank's batch"
            )


def _send_kept(own: ModuleProgram, ranks: Ranks) -> None:
    """Send the state of optimizers and of what else is kept. Values of tensors travel as bytes, of any type."""
    tensors = own.tensors()
    layout = {name: [str(one.dtype).removeprefix("torch."), list(one.shape), one.device.type == "cpu"] for name, one in tensors.items()}
    ranks.share(json.dumps([own.state(), layout]))
    for tensor in tensors.values():
        if tensor.numel():
            ranks.broadcast(_bytes_of(tensor.detach().contiguous()))


def _take_kept(own: ModuleProgram, ranks: Ranks) -> None:
    state, layout = json.loads(ranks.share())
    tensors = {}
    for name, (dtype, shape, is_on_host) in layout.items():
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if is_on_host else own.device)
        if tensors[name].numel():
            ranks.broadcast(_bytes_of(tensors[name]))
    try:
        own.restore(tensors, state)
    except (KeyError, ValueError, RuntimeError) as error:
        reason = f"the state that rank 0 has restored does not fit this rank: {error}"
        raise BadSettings(reason, hint="pass the same optimizers and the same names in `state` on every rank") from error


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _to_text(error: Exception) -> str:
    if not isinstance(error, GossamerError):
        error = GossamerError(f"rank 0 raised {type(error).__name__}: {error}", hint="see the traceback of rank 0")
    return json.dumps(description(error))
