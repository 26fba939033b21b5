"""Every state of a peer: its default reason, and what ends it.

`way_out` is a clause that follows the reason: "training for 3 min: meeting others; ends with the run, or with `peer leave`".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gossamer.peer.machine.events import StateChanged
from gossamer.peer.machine.export_text import export_text

RESUMES: Final = "ends with `peer resume`"
ON_ITS_OWN: Final = "goes on by itself"
STATES: Final[Mapping[str, tuple[str, str]]] = {
    "starting": ("loading its programs", f"{ON_ITS_OWN}, mostly within a minute"),
    "joining": ("looking for the run", f"{ON_ITS_OWN} as soon as a member of the run answers and its weights are here"),
    "waiting": ("waiting for peers", "ends when enough others have joined: `peer invite` prints an invite for them"),
    "training": ("meeting others", "ends with the run, or with `peer leave`"),
    "paused": ("asked to pause", RESUMES),
    "finishing": ("averaging with the others", "ends by itself within minutes"),
    "serving": ("serving as a bootstrap node", "ends with `peer leave`"),
    "leaving": ("asked to leave", "ends within seconds; a second Ctrl-C stops at once"),
    "left": ("gone", "`peer join` continues from here"),
    "done": ("the run is over", export_text()),
    "failed": ("stopped by an error", "correct the cause, then start the peer again with the same command"),
}

# What the node of a staged run reports while its trainer trains: it carries hops, or why its trainer has no work.
CARRYING: Final = "carrying"
STARVED: Final = "starved"  # a neighbouring stage has no holder
CUT_OFF: Final = "cut off"  # nothing is heard of any other peer
PAUSED: Final = "holders paused"  # all its holders are
REFUSED: Final = "refused"  # its holders open no lane
IDLE: Final = "idle"  # there are lanes, and no micro-batch for this peer

BUILDING: Final = "has the run's manifest; the trainer builds its model"  # the host of a new run too

# Ways out of conditions that have no state of their own.
NO_PARTNERS: Final = "ends when another peer comes into sight; it trains on alone meanwhile"
NO_HOLDER: Final = (
    "goes on when a peer that held it starts again, or when a holder of the stage before, which has a copy, moves there: "
    "after a minute, if its own stage has another holder"
)
NO_LINE: Final = "goes on by itself when others answer again; if this machine's network works, the others are down: start one again"
WITHOUT_WORK: Final[Mapping[str, str]] = {
    STARVED: NO_HOLDER,
    CUT_OFF: NO_LINE,
    PAUSED: "goes on when one of them trains again; `peer status` there says what it does",
    REFUSED: "goes on by itself when one of them opens a lane; if this lasts, remove the cause it names, or invite another holder",
    IDLE: "goes on by itself with the next micro-batch; `peer status` shows the lanes, and which neighbour is slow",
}
ALONE: Final = "ends with the run, or with `peer leave`; started with --alone"
SAVES_AGAIN: Final = "ends with the run; it trains on, and saves at the next checkpoint if it can"
START_AGAIN: Final = "the same program goes on from here"  # of a program that has started its own supervisor
RESTART: Final = "ends by itself as soon as it runs again"
SILENT: Final = "ends with the step; if it lasts for minutes, stop the peer and start it again: it goes on from its last checkpoint"


def changed(state: str, reason: str = "", way_out: str = "") -> StateChanged:
    """Return a StateChanged; an empty reason or way out is replaced by the state's default."""
    usual_reason, usual_way_out = STATES[state]
    return StateChanged(state, reason or usual_reason, way_out or usual_way_out)
