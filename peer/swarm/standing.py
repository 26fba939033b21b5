"""Where this peer stands, as its own trainer last said, and the one answer to "may it meet?".

    UNTOLD -- told --> WAITING <-- told --> TRAINING
                          |                    |
                          +---- take_over -----+--> TAKING_OVER -- taken_over --> WAITING or TRAINING, as was last told
    any but LEAVING -- rest --> PAUSED -- wake --> UNTOLD: another trainer will tell
    any -- leave --> LEAVING, for good

Only who is TRAINING meets; whoever asks otherwise gets the code of `refusal`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.tasks import Changes


class PeerState(Enum):
    """What this peer is about."""

    UNTOLD = auto()  # the trainer has not said where it stands
    WAITING = auto()  # the trainer waits for the word to begin, or for weights
    TRAINING = auto()  # it trains, or averages at the end of the run
    TAKING_OVER = auto()  # other weights are about to replace its own
    PAUSED = auto()  # its operator, or a setting of his, wants it to rest
    LEAVING = auto()


class Standing:
    """State, clock and phase of this peer. Belongs to one event loop."""

    def __init__(self) -> None:
        self.state = PeerState.UNTOLD
        self.clock_steps = 0  # own schedule clock
        self.tokens = 0  # trained by this peer since it joined
        self.phase = RunPhase.TRAIN
        self.has_begun = False  # the trainer trains, or has trained
        self.has_settled = False  # on the run's result: it meets nobody any more
        self.stale: set[int] = set()  # fragments that are too old to be met about, or to be given
        self.finished = False  # the trainer has once been at the end of the schedule
        self._changes = Changes()

    @property
    def refusal(self) -> RefusalCode | None:
        """What is said to who asks for a meeting; None when one may begin."""
        if self.state is PeerState.LEAVING:
            return RefusalCode.LEAVING
        return None if self.may_meet else RefusalCode.NOT_READY

    @property
    def may_meet(self) -> bool:
        """Whether meetings may begin."""
        return self.state is PeerState.TRAINING and not self.has_settled

    @property
    def is_paused(self) -> bool:
        """Whether there is, or soon will be, no trainer: so it is announced, and nobody calls in vain."""
        return self.state in (PeerState.PAUSED, PeerState.UNTOLD)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that depends on the standing alone holds."""
        await self._changes.until(condition)

    def told(self, clock_steps: int, phase: RunPhase, has_begun: bool, tokens: int = 0) -> None:
        """Take in where the trainer stands."""
        self.clock_steps, self.phase, self.has_begun, self.tokens = clock_steps, phase, has_begun, tokens
        self.finished |= has_begun and phase is RunPhase.FINISH
        self._enter(self.state if self.state in (PeerState.TAKING_OVER, PeerState.PAUSED) else self._as_told())

    def take_over(self) -> None:
        """Other weights are here: begin nothing until they are the trainer's, or turn out to be of no use."""
        self._enter(PeerState.TAKING_OVER)

    def taken_over(self) -> None:
        """The trainer has them, or does not take them."""
        if self.state is PeerState.TAKING_OVER:
            self._enter(self._as_told())

    def rest(self) -> None:
        """Begin nothing until `wake`."""
        self._enter(PeerState.PAUSED)

    def wake(self) -> None:
        """Go on as soon as a trainer says where it stands."""
        if self.state is PeerState.PAUSED:
            self._enter(PeerState.UNTOLD)

    def leave(self) -> None:
        """Begin nothing any more."""
        self._enter(PeerState.LEAVING)

    def _as_told(self) -> PeerState:
        return PeerState.TRAINING if self.has_begun else PeerState.WAITING

    def _enter(self, state: PeerState) -> None:
        if self.state is not PeerState.LEAVING:
            self.state = state
        self._changes.notify()
