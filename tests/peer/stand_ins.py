"""Light stand-ins for the trainer and the node, so that the supervisor's own doings can be tested in a second.

Each does what the file `<its name>.does` in the home folder says, at each start anew.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from peer.machine.child import Child
from protocol.errors import BadSettings, RunRefusesUs, TransportError

FAILURES = {
    "operator": BadSettings("the port is busy", hint="choose another"),
    "refused": RunRefusesUs("not invited", hint="ask for an invite"),
    "network": TransportError("nobody there", hint="wait"),
    "bug": ValueError("out of cheese"),
}


def main(name: str) -> int:
    child = Child()
    home = child.settings.config.home
    with (home / f"{name}.lives").open("a") as lives:
        lives.write(f"{os.getpid()}\n")
    try:
        return _act(name, child, home)
    except Exception as error:
        return child.fail(error)


def _act(name: str, child: Child, home: Path) -> int:
    does = (home / f"{name}.does").read_text()
    if does in FAILURES:
        raise FAILURES[does]
    child.report(name, _first_words(name, does, child, home))
    if does == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while not child.stop_requested() or does == "deaf":
        if (home / f"{name}.ends").exists():
            return 0
        time.sleep(0.01)
    (home / f"{name}.stopped").write_text(str(time.time_ns()))
    return 0


def _first_words(name: str, does: str, child: Child, home: Path) -> dict[str, object]:
    if name == "node":
        if not (home / "manifest.bin").exists():
            (home / "manifest.bin").write_bytes(b"a manifest")
        return {"manifest_ready": True, "peers_seen": 2, "meetings": {"completed": 3}, "bytes": {"sent": 10, "received": 20}}
    assert (home / "manifest.bin").exists()
    state = "ready" if does == "wait" or child.settings.told_to_start else "training"
    return {"state": state, "reason": "", "step": 7, "meetings": {"solo": 2}, "train_seconds": 1.5}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
