"""What the trainer's two threads share of a meeting, and how the program's thread takes the weights back. See exchange.py."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from gossamer.peer.trainer.fragment_state import OuterStep
from gossamer.peer.trainer.meeting import MeetingSide
from gossamer.peer.trainer.weights import uninterrupted


@dataclass(slots=True)
class OpenMeeting:
    """A meeting of one fragment, from Open until Apply or Drop."""

    number: int
    fragment: int
    side: MeetingSide
    partner_global_step: int = 0
    reason: str | None = None  # why the partner's message is refused, empty: it is not; None: it has not been judged
    is_probed: bool = False  # the loss is to be measured too
    step: tuple[str, OuterStep] | None = None  # the outer step, with the failed blocks for which it was computed
    is_closed: bool = False
    working: threading.Lock = field(default_factory=threading.Lock)  # held while the meeting is computed, and while it is closed


def acquire(lock: threading.Lock) -> None:
    """Acquire a lock; Ctrl-C waits until it is ours."""
    with uninterrupted():
        lock.acquire()
