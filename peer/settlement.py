"""What is left to do for a meeting that counts: write it down, take the outer step, tell the partner or hear that it knows.

The second half of the meeting machine (peer/meeting.py), from the decision on. From here the partner can change nothing any more: what it
sends, or that it is gone, only decides how we end, never whether the outer step is taken.
"""

from __future__ import annotations

from peer import meeting_events as on
from peer import requests as ask
from peer.meeting_events import Command, Finish, MeetingOver, Stage
from protocol.messages import Commit, Committed, Refusal, RefusalCode

CONFIRM_S = 5.0  # how long an initiator that has applied waits for the partner to say that it has recorded the decision
NOT_CONFIRMED = "it counts here; whether the partner heard of it is not known"


class InvalidTransition(AssertionError):
    """An event that cannot happen in this stage: our own bug. Carries the story so far."""


class Settlement:
    """A meeting from its decision to its end, on one side. `commit` is the decision, `number` the trainer link's name of the meeting."""

    def __init__(self, number: int, commit: Commit, initiates: bool) -> None:
        self.stage = Stage.RECORDING
        self._number = number
        self._commit = commit
        self._initiates = initiates
        self._is_confirmed = not initiates  # a responder has nobody to hear from
        self._is_alone = False  # nothing more will come from the partner

    def begin(self) -> list[Command]:
        """Return what must be done first."""
        return [on.Journal(self._commit.meeting_id, self._commit.failed_blocks)]

    def handle(self, event: on.Event) -> list[Command]:
        """Take in one event and return what must be done now. Raises InvalidTransition on our own bugs only."""
        match event:
            case on.Journaled() if self.stage is Stage.RECORDING:
                return self._apply()
            case on.NotJournaled(reason) if self.stage is Stage.RECORDING:
                return self._not_journaled(reason)
            case on.TrainerAnswered(ask.Applied()) if self.stage is Stage.APPLYING:
                return self._on_applied()
            case on.TrainerAnswered(ask.Unavailable(reason=reason)) if self.stage is Stage.APPLYING:
                return self._lost(reason)
            case on.TrainerGone():
                return self._lost("the trainer went away") if self.stage is Stage.APPLYING else []
            case on.PartnerSent(Committed(meeting_id)) if self._initiates and meeting_id == self._commit.meeting_id:
                self._is_confirmed = True
                return self._end_if_applied()
            case on.PartnerGone() | on.PartnerBroke():
                self._is_alone = True
                return self._end_if_applied()
            case on.PartnerSent() | on.DeadlinePassed() | on.Stopped():
                return self._end_if_applied()
            case on.Resolved():
                return []
        raise InvalidTransition(f"{event} in {self.stage.name}")

    def _apply(self) -> list[Command]:
        """Own trainer before the partner: if we die in between, a partner that asks learns it from the journal."""
        self.stage = Stage.APPLYING
        meeting_id = self._commit.meeting_id
        told = self._commit if self._initiates else Committed(meeting_id)
        return [on.Tell(ask.Apply(self._number, meeting_id.hex(), self._commit.failed_blocks.hex())), on.Send(told)]

    def _not_journaled(self, reason: str) -> list[Command]:
        if not self._initiates:
            return self._apply()  # it counts for the partner, whose journal is the one that is asked
        refusal = Refusal(RefusalCode.NOT_READY, "cannot record the decision")
        return [on.Send(refusal), on.Drop(), Finish(MeetingOver.ABANDONED, f"the decision cannot be recorded: {reason}")]

    def _on_applied(self) -> list[Command]:
        self.stage = Stage.CONFIRMING
        if self._is_confirmed or self._is_alone:
            return self._end_if_applied()
        return [on.Allow(CONFIRM_S)]

    def _lost(self, reason: str) -> list[Command]:
        return [on.Drop(), Finish(MeetingOver.ABANDONED, f"it counts for the partner, but is lost here: {reason}")]

    def _end_if_applied(self) -> list[Command]:
        if self.stage is not Stage.CONFIRMING:
            return []
        return [Finish(MeetingOver.COMPLETED, "" if self._is_confirmed else NOT_CONFIRMED)]
