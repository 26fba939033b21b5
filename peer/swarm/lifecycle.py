"""The lifecycle of this peer: its state as its own trainer reports it, and whether it may meet.

    UNKNOWN -- update --> WAITING <-- update --> TRAINING
                             |                      |
                             +--- begin_takeover ---+--> TAKING_OVER -- end_takeover --> WAITING or TRAINING, as last reported
    any but LEAVING -- pause --> PAUSED -- resume --> UNKNOWN, until the next trainer reports; then TAKING_OVER, if that has begun
    any -- leave --> LEAVING, which is final

Only a TRAINING peer meets; in every other state `refusal` is the code for a partner that calls.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.messages.figures import MemberFigures
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.tasks import Changes


class LifecycleState(Enum):
    """The lifecycle state of this peer."""

    UNKNOWN = auto()  # the trainer has not reported yet
    WAITING = auto()  # the trainer waits for the order to start, or for weights
    TRAINING = auto()  # it trains, or takes part in the last averaging
    TAKING_OVER = auto()  # other weights are about to replace the trainer's
    PAUSED = auto()  # by the operator or a setting
    LEAVING = auto()


class Lifecycle:
    """State, global step and phase of this peer. Belongs to one event loop."""

    def __init__(self) -> None:
        self.state = LifecycleState.UNKNOWN
        self.global_step = 0  # this peer's global step
        self.stage = 0  # in a staged run: that this peer holds, plus one, once it is known
        self.tokens = 0  # trained by this peer since it joined
        self.own_steps = 0  # inner steps made by this peer, over all its sessions
        self.figures: MemberFigures | None = None  # of this peer's own part
        self.phase = RunPhase.TRAIN
        self.has_begun = False  # the trainer trains, or has trained
        self.has_agreed = False  # it has the agreed result and meets no more
        self.stale: set[int] = set()  # fragments whose weights are too old to meet with or to serve
        self.finished = False  # the trainer has reached the end of the schedule
        self._num_takeovers = 0  # that have begun and not ended
        self._changes = Changes()

    @property
    def refusal(self) -> RefusalCode | None:
        """The code for a partner that calls; None if a meeting may begin."""
        if self.state is LifecycleState.LEAVING:
            return RefusalCode.LEAVING
        return None if self.may_meet else RefusalCode.NOT_READY

    @property
    def may_meet(self) -> bool:
        """Whether meetings may begin."""
        return self.state is LifecycleState.TRAINING and not self.has_agreed

    @property
    def is_paused(self) -> bool:
        """Whether this peer has no trainer now, or soon will have none; it is announced as paused, so that no peer calls it."""
        return self.state in (LifecycleState.PAUSED, LifecycleState.UNKNOWN)

    @property
    def is_starting(self) -> bool:
        """Whether the trainer has not reported yet, in this start of the node or since the last pause."""
        return self.state is LifecycleState.UNKNOWN

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on this lifecycle holds."""
        await self._changes.until(condition)

    def update(self, global_step: int, phase: RunPhase, has_begun: bool, tokens: int = 0, own_steps: int = 0) -> None:
        """Take in a report of the trainer."""
        self.global_step, self.phase, self.has_begun = global_step, phase, has_begun
        self.tokens, self.own_steps = tokens, own_steps
        self.finished |= has_begun and phase is RunPhase.FINISH
        self._enter(self.state if self.state in (LifecycleState.TAKING_OVER, LifecycleState.PAUSED) else self._as_reported())

    def begin_takeover(self) -> None:
        """Begin no meeting until the trainer has adopted or rejected other weights. A pause, or a wait for a trainer, stays one."""
        self._num_takeovers += 1
        self._enter(self.state if self.is_paused else LifecycleState.TAKING_OVER)

    def end_takeover(self) -> None:
        """Note that the trainer has adopted or rejected them."""
        self._num_takeovers -= 1
        if self.state is LifecycleState.TAKING_OVER:
            self._enter(self._as_reported())

    def pause(self) -> None:
        """Begin no meeting until `resume` and the next report."""
        self._enter(LifecycleState.PAUSED)

    def resume(self) -> None:
        """Leave the pause; the next report of a trainer sets the state."""
        if self.state is LifecycleState.PAUSED:
            self._enter(LifecycleState.UNKNOWN)

    def hold(self, stage: int) -> None:
        """Note the stage, counted from one, that this peer holds in a staged run, or will hold once its trainer is ready."""
        self.stage = stage
        self._changes.notify()

    def leave(self) -> None:
        """Begin no meeting any more."""
        self._enter(LifecycleState.LEAVING)

    def _as_reported(self) -> LifecycleState:
        if self._num_takeovers:
            return LifecycleState.TAKING_OVER
        return LifecycleState.TRAINING if self.has_begun else LifecycleState.WAITING

    def _enter(self, state: LifecycleState) -> None:
        if self.state is not LifecycleState.LEAVING:
            self.state = state
        self._changes.notify()
