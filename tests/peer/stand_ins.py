"""Light stand-ins for the trainer and the node, so that the supervisor's own doings can be tested in a second.

Each does what the file `<its name>.does` in the home folder says, at each start anew.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from gossamer.peer.machine.child import Child, run_child
from gossamer.peer.machine.events import QUIET, Event, MeetingDone, PeersSeen, ProcessReported, RunKnown, SoloStep, StageMoved, StepDone
from gossamer.protocol.errors import BadSettings, RunRefusesUs, SwarmUnreachable, TransportError

FAILURES = {
    "operator": BadSettings("the port is busy", hint="choose another"),
    "complains late": BadSettings("there is too little", hint="allow more"),
    "refused": RunRefusesUs("not invited", hint="ask for an invite"),
    "network": TransportError("nobody there", hint="wait"),
    "nobody": SwarmUnreachable("nobody answers", hint="wait"),
    "bug": ValueError("out of cheese"),
}


def main(name: str) -> int:
    return run_child(partial(_act, name))


def _act(name: str, child: Child) -> None:
    home = child.settings.config.home
    with (home / f"{name}.lives").open("a") as lives:
        lives.write(f"{os.getpid()}\n")
    does = (home / f"{name}.does").read_text()
    while does == "complains late" and not (home / f"{name}.complains").exists():
        time.sleep(0.01)
    if does in FAILURES:
        raise FAILURES[does]
    for event in _first_words(name, does, child, home):
        child.emit(event)
    if does == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    last_settings = None
    while not child.stop_requested() or does == "deaf":
        if name == "node" and child.settings is not last_settings:
            last_settings = child.settings
            (home / "node.rests").write_text(str(last_settings.paused))
            if last_settings.paused and does != "meets":
                child.emit(ProcessReported(QUIET, ""))
        if (home / f"{name}.ends").exists():
            return
        time.sleep(0.01)
    (home / f"{name}.stopped").write_text(str(time.time_ns()))


def _first_words(name: str, does: str, child: Child, home: Path) -> list[Event]:
    if name == "node":
        if not (home / "manifest.bin").exists():
            (home / "manifest.bin").write_bytes(b"a manifest")
        if does == "count":
            return [ProcessReported("joining", f"downloading weights: {percent} %") for percent in range(0, 101, 5)]
        if does == "seed":
            return [RunKnown("ab", 100), PeersSeen(2), ProcessReported("serving", "2 connected")]
        if does == "moves":
            (home / "node.does").write_text("serve")
            return [RunKnown("ab", 100), PeersSeen(2), StageMoved(1, 2)]
        return [RunKnown("ab", 100), *3 * [MeetingDone("12D3KooY", 0, "completed", "", "tunnel", 10, 20, 0.1)], PeersSeen(2)]
    assert (home / "manifest.bin").exists()
    state = "ready" if does == "wait" or child.settings.waits_for_start else "training"
    return [*2 * [SoloStep(0, "")], StepDone(5, 7, 80, 2.5, 0.1, 10.0, 1.5, 0.5, 1.25, 0.25), ProcessReported(state, "")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
