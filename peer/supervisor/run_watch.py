"""The supervisor's look at the whole run: what the node sees of the members, over all starts."""

from __future__ import annotations

import time
from typing import Any

from gossamer.peer.machine.child import OwnPart
from gossamer.peer.machine.events import ClockSet, CurveTold, Event, MembersSeen, RunKnown
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import kept_view
from gossamer.peer.machine.status import Status

PUBLISH_S = 5.0  # between two reports of our own part to the node, whose record carries it


class RunWatch:
    """Folds the node's reports into a RunView. An unreadable file counts as none: it holds nothing that training needs."""

    def __init__(self, home: Home) -> None:
        self._view = kept_view(home)
        self._published_s = 0.0
        self._published: OwnPart | None = None

    def take(self, event: Event) -> None:
        """Take in an event; most say nothing about the run."""
        match event:
            case RunKnown():
                self._view.begin(event.run_id, event.total_steps, event.step_tokens, event.stages)
            case MembersSeen():
                self._view.take(event)
            case CurveTold():
                self._view.take_curve(event)
            case ClockSet():
                self._view.move(event.seconds)
                self._published_s += event.seconds

    def look(self, now_s: float, status: Status) -> OwnPart | None:
        """Note who has gone; return our own part if it is to be published again."""
        self._view.look(now_s)
        if status.state == "training":
            self._view.note_own(status.step, status.tokens, status.own_steps, status.loss)
        part = own_part(status)
        if part == self._published or now_s - self._published_s < PUBLISH_S:
            return None
        self._published, self._published_s = part, now_s
        return part

    def record(self) -> dict[str, Any]:
        """Return what the next start goes on from, JSON-able."""
        return self._view.to_record()

    def shown(self) -> dict[str, Any]:
        """Return what `peer run` and the page show."""
        return self._view.to_json(time.time())


def own_part(status: Status) -> OwnPart:
    """Return this peer's part in the run since it joined."""
    lifetime = status.lifetime
    return OwnPart(
        tokens=status.tokens,
        own_steps=status.own_steps,
        loss=status.loss if status.state == "training" else None,
        joined=lifetime["joined"],
        carried_bytes=lifetime["sent"] + lifetime["received"],
    )
