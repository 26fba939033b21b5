"""A program of several ranks (torch.distributed: DDP, FSDP2) as one peer: rank 0 has the node, and the other ranks follow it.

Every rank makes the same calls in the same order. In each, rank 0 learns what all ranks call, and acts as a program of one process would.
What needs the others it orders; at the end it sends one small tensor: its clock, and whether training is over. Between two calls all ranks
use what the last one has brought, so that no rank ends its loop, or changes its learning rate, before the others.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from gossamer.channel import FIRST, Call, Called, News, Order, RankGone, Ranks
from gossamer.module_program import Evaluate, Model, Stateful
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.own_supervisor import OwnSupervisor
from gossamer.peer.trainer.boundary import Boundary
from gossamer.peer.trainer.stopwatch import count_of
from gossamer.protocol.errors import BadSettings, GossamerError, description, from_description
from gossamer.rank_program import RankProgram
from gossamer.swarm import Clock, Swarm

ON_FIRST: Final = "call it on rank 0: `if torch.distributed.get_rank() == 0: ...`"


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

    def __init__(self, supervisor: OwnSupervisor, boundary: Boundary, optimizers: Sequence[Optimizer], own: RankProgram) -> None:
        super().__init__(supervisor, boundary, optimizers)
        self.clock = self._shared_clock = SharedClock(self._replica.manifest.run.total_steps)
        self._own = own
        self._ranks = own.ranks
        self._is_deciding = True  # inside a call of all ranks: what happens counts at once
        self._was_over = False  # at the end of the last one
        self._sent = [-1] * len(self._replica.fragments)  # `num_writes` of each fragment, as the others have it

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
        with self._together(Call.STEP, count_of(tokens)) as total:
            super().step(tokens=total, loss=loss)

    def save(self) -> None:
        """As Swarm.save."""
        with self._together(Call.SAVE):
            super().save()

    def state_dict(self) -> dict[str, Any]:
        """As Swarm.state_dict; of what is sharded, on the host."""
        with self._together(Call.STATE_DICT):
            return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As Swarm.load_state_dict."""
        with self._together(Call.LOAD_STATE_DICT):
            super().load_state_dict(state)

    def finish(self) -> None:
        """As Swarm.finish."""
        self._need_thread()
        if not self._is_closed:
            with self._together(Call.FINISH):
                super().finish()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt) or self._is_closed:
            super().__exit__(kind, error, trace)
        elif self._replica.weights.is_sharded:  # the others may be at any place: what they hold cannot be saved
            self._close(error)
        else:  # they learn it as the channel closes
            Swarm.finish(self)

    def begin(self) -> None:
        """Send the others the run, and the state with which training begins."""
        try:
            self._share(None)
            self._ranks.share(json.dumps([str(self._home.path), self._replica.manifest.run.total_steps, self.is_alone]))
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
            self._own.reshard()
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
        moved = [one.codec.fragment for one, sent in zip(replica.fragments, self._sent, strict=True) if one.num_writes != sent]
        with self._boundary.watch.blocked("meetings") if moved else contextlib.nullcontext():
            for fragment in moved:
                self._own.even_out(fragment)
        is_over = self._is_closed or self.over
        news = News(error is not None, self._is_closed, is_over, replica.global_step, replica.steps_since_join())
        self._ranks.end(news)
        if error is not None:
            self._ranks.share(_to_text(error))
        self._sent, self._was_over = writes, is_over
        self._shared_clock.set(news)

    def _close(self, failure: BaseException | None) -> None:
        super()._close(failure)
        if not self._is_deciding:
            self._ranks.close()


class FollowingSwarm(Swarm):
    """The place of any other rank in a run: it has no node, and does as rank 0 does."""

    def __init__(self, own: RankProgram) -> None:
        self._own = own
        self._ranks = own.ranks
        self._thread = threading.get_ident()
        self._is_leaving = threading.Event()
        self._is_closed = False
        self._is_over = False
        self._is_alone: bool
        self._rate = 0.0
        self._on_adopted: Callable[[], None] = lambda: None
        begun = self._follow()
        home, total_steps, self._is_alone = json.loads(self._ranks.share())
        self._folder = Path(home)
        self.clock = self._shared_clock = SharedClock(total_steps)
        self._shared_clock.set(begun)

    @property
    def over(self) -> bool:
        """As Swarm.over, at the end of the last call."""
        return self._is_over

    def wait(self) -> None:
        """As Swarm.wait."""
        self._together(Call.WAIT)

    def step(self, *, tokens: int, loss: float | Tensor | None = None) -> None:
        """As Swarm.step; the status shows the loss of rank 0."""
        self._together(Call.STEP, count_of(tokens))

    @property
    def status(self) -> dict[str, Any]:
        """As Swarm.status, on the machine of rank 0."""
        return ask(self._folder, {"verb": "status"})

    @property
    def is_alone(self) -> bool:
        """As Swarm.is_alone."""
        return self._is_alone

    def invite(self, *, uses: int | None = None) -> str:
        """Raise BadSettings: rank 0 issues invites."""
        raise BadSettings("only rank 0 has the peer's identity, with which it signs invites", hint=ON_FIRST)

    def save(self) -> None:
        """As Swarm.save: rank 0 writes the checkpoint."""
        self._together(Call.SAVE)

    def on_adopted(self, call: Callable[[], None]) -> None:
        """As Swarm.on_adopted."""
        self._on_adopted = call

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: rank 0's is that of the peer."""
        self._together(Call.STATE_DICT)
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
        self._own.reshard()
        try:
            self._shared_clock.set(self._follow())
        finally:
            if self._is_closed:
                self._ranks.close()

    def _follow(self) -> News:
        """Carry out what rank 0 orders until the call ends; return what counts then. Raises its error."""
        num_cleared = self._own.num_cleared
        while isinstance(news := self._ranks.next(), Order):
            self._own.obey(news)
        self._is_closed, self._is_over = news.is_closed, news.is_over
        failure = json.loads(self._ranks.share()) if news.has_failed else None
        if self._own.num_cleared != num_cleared:
            self._on_adopted()
        if failure is not None:
            raise from_description(failure)
        return news


def started(
    model: Model,
    optimizers: Sequence[Optimizer],
    evaluate: Evaluate | None,
    kept: Mapping[str, Stateful],
    opened: Callable[[RankProgram], tuple[OwnSupervisor, Boundary]],
) -> Swarm:
    """Start this program's peer on rank 0, where `opened` is called, and follow it on the others. Raises its OperatorError on all ranks."""
    ranks = Ranks()
    try:
        own = RankProgram(model, optimizers, evaluate, kept, ranks)
        layouts = ranks.collect(own.layout)
        return _led(own, optimizers, opened, layouts) if ranks.is_first else FollowingSwarm(own)
    except BaseException:
        ranks.close()
        raise


def _led(
    own: RankProgram,
    optimizers: Sequence[Optimizer],
    opened: Callable[[RankProgram], tuple[OwnSupervisor, Boundary]],
    layouts: Sequence[str],
) -> Swarm:
    try:
        for number, layout in enumerate(layouts):
            if layout != layouts[FIRST]:
                raise BadSettings(
                    f"rank {number} has another model than rank 0, or shards it in another way",
                    hint="wrap the same model on every rank, in DistributedDataParallel or with fully_shard",
                )
        supervisor, boundary = opened(own)
    except Exception as error:
        own.ranks.end(News(True, True, True, 0, 0))
        own.ranks.share(_to_text(error))
        raise
    swarm = LeadingSwarm(supervisor, boundary, optimizers, own)
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
                f"step(tokens=...) on rank {number}: it takes a count, an int",
                hint="pass the number of examples or tokens of this rank's batch",
            )


def _to_text(error: Exception) -> str:
    if not isinstance(error, GossamerError):
        error = GossamerError(f"rank 0 raised {type(error).__name__}: {error}", hint="see the traceback of rank 0")
    return json.dumps(description(error))
