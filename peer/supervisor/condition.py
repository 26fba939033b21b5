"""State and reason of a peer as text, composed from the reports of its processes and of the supervisor.

The trainer takes precedence: a peer that trains is `training`, and trouble of the network becomes the reason. Before training, or
without a trainer, the state is the node's (joining, waiting, serving). Pure bookkeeping; time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.peer.machine.config import NODE, TRAINER
from gossamer.peer.machine.events import Event, ProcessReported, StateChanged
from gossamer.peer.machine.states import ALONE, BUILDING, NO_PARTNERS, RESTART, SAVES_AGAIN, SILENT, STATES, WITHOUT_WORK, changed
from gossamer.peer.supervisor.pauses import Pause

SILENT_S = 15.0  # a trainer reports about once a second; a longer silence is shown
HUNG_S = 300.0  # no inner step takes so long where training makes sense
BUSY = ("training", "finishing")
MEANWHILE = {TRAINER: "it goes on from its last checkpoint", NODE: "training goes on without it"}


@dataclass(slots=True)
class LastReport:
    """The last report of a process."""

    state: str = ""
    reason: str = ""
    trouble: str = ""  # why it is down; empty while it runs


@dataclass(slots=True)
class Condition:
    """The known state of the processes; `describe` combines it into one state with its reason."""

    children: tuple[str, ...]  # of this peer
    has_trained: bool = False  # ever, in this start
    reports: dict[str, LastReport] = field(default_factory=lambda: {TRAINER: LastReport(), NODE: LastReport()})
    reported_s: float = 0.0  # when the trainer last sent an event
    pause: Pause | None = None  # required now; the trainer may still be saving
    ending: StateChanged | None = None  # the final state, set by the supervisor

    @property
    def trains(self) -> bool:
        """Whether the trainer trains now."""
        return self.reports[TRAINER].state in BUSY

    def take_event(self, name: str, event: Event, now_s: float) -> None:
        """Record an event of the node or the trainer."""
        if name == TRAINER:
            self.reported_s = now_s
        elif self.reports[NODE].trouble:
            self.reports[NODE] = LastReport()  # it is back
        if isinstance(event, ProcessReported):
            self.reports[name] = LastReport(event.state, event.reason)
            self.has_trained |= self.trains

    def note_exit(self, name: str, reason: str, pause_s: float) -> None:
        """Record that the trainer or the node has ended and will be restarted."""
        meanwhile = f", {MEANWHILE[name]}" if TRAINER in self.children else ""
        again = f"it is started again after {pause_s:.0f} s" if pause_s >= 1 else "it is started again at once"
        self.reports[name] = LastReport(trouble=f"the {name} ended ({reason}); {again}{meanwhile}")
        self._forget_arrival()

    def note_stop(self, name: str) -> None:
        """Record that the trainer or the node was stopped in order: what it last reported holds no longer."""
        self.reports[name] = LastReport()
        self._forget_arrival()

    def _forget_arrival(self) -> None:
        """Forget the node's last report of how it joined or waited: it reports anew if it still does."""
        if not self.reports[NODE].trouble and TRAINER in self.children:
            self.reports[NODE] = LastReport()

    def describe(self, peers_seen: int, now_s: float) -> StateChanged:
        """Return the state, the reason for it, and what would end it."""
        trainer, node = self.reports[TRAINER], self.reports[NODE]
        if self.ending is not None:
            return self.ending
        if self.pause is not None:
            if self.pause.is_last:
                return changed("leaving", self.pause.reason, self.pause.way_out)
            return changed("paused", self.pause.reason + (" (saving first)" if self.trains else ""), self.pause.way_out)
        if trainer.trouble:
            return changed("starting", trainer.trouble, RESTART)
        if self.trains and node.state in WITHOUT_WORK and not node.trouble:
            return changed("waiting", node.reason, WITHOUT_WORK[node.state])
        if self.trains:
            return changed(trainer.state, *self._reason_and_way_out(peers_seen, now_s))
        if node.trouble:
            return changed("joining", node.trouble, RESTART)
        if trainer.state == "starting":
            return changed("starting", trainer.reason)
        if node.state:
            return changed(node.state, node.reason, STATES["starting"][1] if node.reason == BUILDING else "")
        if NODE not in self.children:
            return changed("starting", "building the model")
        return changed("starting", "opening the network" if trainer.state or TRAINER not in self.children else "")

    def trouble(self, now_s: float) -> str:
        """Return why this peer does not work; empty if it works, waits for peers, or starts normally."""
        state = self.describe(0, now_s)
        if state.state in ("starting", "failed") or (self.trains and now_s - self.reported_s >= HUNG_S):
            return f"{state.state}: {state.reason}"
        return "" if self.trains else self.reports[NODE].trouble

    def _reason_and_way_out(self, peers_seen: int, now_s: float) -> tuple[str, str]:
        """Return the reason and the way out of a peer that trains or averages; empty for the defaults."""
        silent_s = now_s - self.reported_s
        trainer, node = self.reports[TRAINER], self.reports[NODE]
        if silent_s >= SILENT_S:
            return f"the trainer has been silent for {silent_s // 5 * 5:.0f} s: a long step, or it hangs", SILENT
        if node.trouble:
            return node.trouble, RESTART
        if trainer.reason:
            return trainer.reason, SAVES_AGAIN if trainer.state == "training" else ""
        if NODE not in self.children:
            return "training alone (--alone)", ALONE
        return ("", "") if peers_seen else ("no other peer in sight", NO_PARTNERS)
